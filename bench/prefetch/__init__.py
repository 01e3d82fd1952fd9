"""`cloakfs prefetch`: what the heuristics of reading ahead make of a stream, and the paper's experiments again."""
