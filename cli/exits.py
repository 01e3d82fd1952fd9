"""The exit statuses of commands (docs/commands.md)."""

FAILED = 1
"""The command cannot be carried out: something is missing, not permitted or in use; or `check` found errors."""

WRONG = 2
"""The request is wrong: the command line, an option or a configuration."""

NEGATIVE = 3
"""It has been found out, and the answer is no: hidden (`explain`), more is open (`exposure --diff`), not healthy."""
