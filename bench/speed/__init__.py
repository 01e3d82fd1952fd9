"""`python -m bench`: cloakfs against the bare tree and what else can be laid over one, as ratios within one run."""
