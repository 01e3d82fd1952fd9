"""The types of client ids and server ids, which a type checker keeps apart.

At run time both are integers. Only `mapping` translates an id of one realm into one of the other. Ids from outside get
their type where they enter: from a request, from the text of the configuration, from the real tree.
"""

from typing import NewType

ClientId = NewType("ClientId", int)
"""A uid or gid as clients know it: in a request, and in the attributes that are shown."""

ServerId = NewType("ServerId", int)
"""A uid or gid of the server: on disk, and in system calls."""
