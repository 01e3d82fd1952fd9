"""Who could see and do what, found out by asking the same view as a mount would, without a mount."""
