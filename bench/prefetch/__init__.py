"""`python -m bench prefetch`: feeds streams to the heuristics of reading ahead, and repeats the paper's experiments."""
