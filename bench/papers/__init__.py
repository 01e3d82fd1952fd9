"""`cloakfs bench papers`: repeats the experiments of the papers, and draws their figures beside the printed values."""
