"""What measures: `python -m bench`, in a clone. It is not part of an installation."""
