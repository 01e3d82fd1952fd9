"""A laboratory whose kernel has an NFS server and client: user-mode Linux, an ordinary process."""
