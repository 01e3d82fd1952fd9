"""cloakfs over cloakfs: what a mount grants to the daemon of an upper mount, and how that queries the lower one."""
