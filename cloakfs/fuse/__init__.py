"""Sessions with the kernel, by pyfuse3 and /dev/fuse; nothing of policies, views or the configuration."""
