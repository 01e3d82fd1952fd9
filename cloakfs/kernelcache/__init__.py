"""What the kernel may cache of a mount, for how long, and how it is invalidated."""
