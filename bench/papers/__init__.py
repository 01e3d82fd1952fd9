"""`python -m bench papers`: the experiments of the papers again, with their figures beside the printed values."""
