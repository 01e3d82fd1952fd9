"""cloakfs over cloakfs: what the lower mount grants to the daemon above, and what that one asks of it."""
