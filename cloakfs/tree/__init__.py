"""The real tree: what is in it, where it is now, and the system calls on it."""
