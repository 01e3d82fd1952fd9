"""The fork server of a service: runs `cloakfs mount`, with all that this imports."""

from cloakfs.background.forkserver import serve

from . import (
    main,
    mount,  # noqa: F401  (it is there before a process is forked)
)

if __name__ == "__main__":
    serve(main.main)
