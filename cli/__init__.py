"""The `cloakfs` command: one module per subcommand."""
