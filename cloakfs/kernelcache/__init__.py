"""What the kernel remembers of a mount."""
