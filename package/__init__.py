"""What turns this repository into packages (scripts/package)."""
