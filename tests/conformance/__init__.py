"""The pjdfstest and fsx suites: the same result through a mount as on the backing file system."""
