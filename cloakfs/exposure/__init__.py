"""What a compromised client could do: `cloakfs exposure`."""
