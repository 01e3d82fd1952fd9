"""Laboratories whose kernels have an NFS server and client: user-mode Linux, an ordinary process; and stock kernels."""
