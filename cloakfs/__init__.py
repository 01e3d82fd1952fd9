"""cloakfs: a view of its own for every caller of a shared tree."""
