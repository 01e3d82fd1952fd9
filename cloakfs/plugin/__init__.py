"""What the author of a plug-in policy needs (docs/plug-ins.md); everything else may change with any version."""

from ..config.options import Options
from ..identity import Caller, ClientCaller, ClientId, ServerId
from ..mapping import Kind
from ..policy import Attrs, Policy

__all__ = ["Attrs", "Caller", "ClientCaller", "ClientId", "Kind", "Options", "Policy", "ServerId"]
