"""Whose numbers are meant: a client's or the server's. To a type checker these are different things.

At run time both are integers. An id of one realm becomes one of the other in `mapping` alone; what comes from outside
gets its type where it comes in: from a request, from the text of the configuration, from the real tree.
"""

from typing import NewType

ClientId = NewType("ClientId", int)
"""A uid or gid as clients know it: in a request, and in what is shown."""

ServerId = NewType("ServerId", int)
"""A uid or gid of the server: on disk, and what system calls are made as."""
