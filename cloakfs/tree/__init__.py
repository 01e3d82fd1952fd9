"""The real tree: the objects in it, where they are now, and the system calls on them."""
