"""All that knows pyfuse3, libfuse or /dev/fuse, and nothing of cloakfs."""
