"""Where a caller's groups and capabilities come from: the user database, and what /proc says of its threads."""
