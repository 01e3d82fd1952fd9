"""What a policy decides, the built-in policy (range-mapping and cloaking), and plug-ins.

A plug-in is a small class. It may define any of the methods of `Policy`; for the others, the built-in policy does
what the export's options say. The class may also derive from `Policy`, which gives it `super()`.
"""

import importlib
import inspect
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from .caller import Caller, ClientCaller
from .cloak import CloakList
from .config.options import Options
from .errors import UserError
from .ids import ClientId, ServerId
from .mapping import IdMap, Kind, packed


def _mode_bits(caller: Caller, attrs: "Attrs", mode: int) -> bool:
    """Whether the mode bits alone grant access, with root's privileges as in capabilities(7), CAP_DAC_OVERRIDE."""
    if caller.uid == 0:
        granted = 7 if attrs.mode & 0o111 or stat.S_ISDIR(attrs.mode) else 6
    elif caller.uid == attrs.uid:
        granted = attrs.mode >> 6
    else:
        granted = attrs.mode >> 3 if attrs.gid in caller.groups else attrs.mode
    return mode & ~granted == 0


# It is not frozen, because that would triple the cost of an instance, and every name of every listing needs one.
@dataclass(slots=True)
class Attrs:
    """What a policy may know of one object of the real tree. Ids are server ids, except in the result of `Policy.show`.

    Attributes:
        name: the last component of the path by which it was reached ("" for the root of the export); bytes that
            are not UTF-8 are surrogate-escaped.
        mode: type and permission bits, as in stat(2).
        uid: the owner.
        gid: the group.
        size: the size in bytes.
        nlink: the number of hard links.
        mtime_ns: the time of the last modification, in nanoseconds since the epoch.
    """

    name: str
    mode: int
    uid: ServerId
    gid: ServerId
    size: int = 0
    nlink: int = 1
    mtime_ns: int = 0
    _access: Callable[[Caller, int], bool] | None = field(default=None, repr=False, compare=False)

    def accessible(self, caller: Caller, mode: int) -> bool:
        """Whether the kernel would let `caller` (server ids) access the object (4 read, 2 write, 1 execute).

        The answer follows the mode bits and ACLs of the real tree, as faccessat2(2) with AT_EACCESS sees them. For an
        object that is about to be created, it follows the mode bits that the object will have.
        """
        if self._access is None:
            return _mode_bits(caller, self, mode)
        return self._access(caller, mode)


class Policy:
    """The built-in policy: `range_map` and `cloak_list` of an export [SZ §2], and `exempt`.

    Args:
        options: the export's options; by default those of an export that specifies none.

    Attributes:
        hides: False promises that `visible` is always True, so that it need not be called.
    """

    def __init__(self, options: Options | None = None) -> None:
        options = options or Options()
        self.options = options
        range_map = packed(options.range_map)
        self.ids: dict[Kind, IdMap] = {
            "uid": range_map.table("uid", options.anonuid, options.squash),
            "gid": range_map.table("gid", options.anongid, options.squash),
        }
        self.cloak = CloakList(
            options.cloak_list, nobody_uid=options.anonuid, nobody_gid=options.anongid, exempt=options.exempt
        )
        self.hides = self.cloak.hides or not is_built_in(self, "visible")

    def forward(self, caller: ClientCaller) -> Caller:
        """Return the identity on the server for a caller."""
        gids = self.ids["gid"]
        gid = gids.forward(caller.gid)
        return Caller(self.ids["uid"].forward(caller.uid), gid, gids.groups(caller.groups - {caller.gid}) | {gid})

    def visible(self, caller: Caller, attrs: Attrs) -> bool:
        """Whether `caller` (server ids) may know that this object exists. Never called for the root of an export."""
        return self.cloak.visible(attrs.mode, attrs.uid, attrs.gid, caller.uid, caller.groups)

    def show(self, attrs: Attrs) -> Attrs:
        """Return the attributes as clients see them; only mode, uid and gid are used, and the ids are client ids."""
        shown: dict[str, Any] = {"uid": self.client_id("uid", attrs.uid), "gid": self.client_id("gid", attrs.gid)}
        return replace(attrs, **shown)

    def same_for_all(self, attrs: Attrs) -> bool:
        """Whether `visible` gives every caller the same answer; False when in doubt."""
        return is_built_in(self, "visible") and self.cloak.same_for_all(attrs.mode, attrs.uid, attrs.gid)

    def server_id(self, kind: Kind, client_id: ClientId) -> ServerId | None:
        """Return the server id for chown and ACL entries; with None, the request is refused with EINVAL."""
        return self.ids[kind].counterpart(client_id, "forward")

    def client_id(self, kind: Kind, server_id: ServerId) -> ClientId:
        """Return the client id shown for a server id in attributes and ACL entries; nobody's if there is none."""
        return self.ids[kind].reverse(server_id)


METHODS = ("forward", "visible", "show", "same_for_all", "server_id", "client_id")
"""The methods that a plug-in may define."""


def is_built_in(policy: Policy, method: str) -> bool:
    """Whether `policy` leaves this method to the built-in policy."""
    return getattr(type(policy), method) is getattr(Policy, method) and method not in vars(policy)


class PolicyError(UserError, ValueError):
    """A plug-in cannot be loaded; the text is one line that says why."""


def is_in_file(spec: str | None) -> bool:
    """Whether `spec` names a FILE, which is read again each time, and not an installed module."""
    return spec is not None and spec.rpartition(":")[0].endswith(".py")


def load_policy(spec: str | None, options: Options, directory: str = ".") -> Policy:
    """Return the policy that `spec` names, for an export with `options`.

    Args:
        spec: None for the built-in policy, `FILE.py:Class`, or `package.module:Class`.
        options: the options of the export; passed to the class if its constructor takes an argument.
        directory: the directory that a relative FILE is relative to.

    Raises:
        PolicyError: there is no such file, module or class, or it failed while loading.
    """
    if spec is None:
        return Policy(options)
    where, colon, name = spec.rpartition(":")
    if not colon or not name.isidentifier():
        raise PolicyError(f"policy={spec}: expected FILE.py:Class or package.module:Class")
    try:
        module = _run(os.path.join(directory, where)) if is_in_file(spec) else importlib.import_module(where)
        plugin_class = getattr(module, name)
        takes_options = bool(inspect.signature(plugin_class).parameters)
        plugin = plugin_class(options) if takes_options else plugin_class()
        if not any(hasattr(plugin, method) for method in METHODS):
            raise PolicyError(f"policy={spec}: {name} has none of the methods {', '.join(METHODS)}")
        if not isinstance(plugin, Policy):
            return _adopt(plugin, options)
        if not hasattr(plugin, "cloak"):
            raise PolicyError(f"policy={spec}: {name}.__init__ does not call super().__init__(options)")
    except PolicyError:
        raise
    except (Exception, SystemExit) as exc:
        # The message must be one line, but that of a plug-in may have several.
        raise PolicyError(f"policy={spec}: {type(exc).__name__}: {' '.join(str(exc).split())}") from exc
    return plugin


def _run(path: str) -> ModuleType:
    """Return the module in a file as it is now; Python's bytecode cache would compare times in whole seconds."""
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    module = ModuleType(f"cloakfs_policy_{os.path.basename(path).removesuffix('.py')}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses look for it there
    exec(code, vars(module))
    return module


def _adopt(plugin: Any, options: Options) -> Policy:
    """Return the built-in policy with the methods that `plugin` defines in place of its own."""
    policy = Policy(options)
    for method in METHODS:
        if hasattr(plugin, method):
            setattr(policy, method, getattr(plugin, method))
    policy.hides = policy.hides or not is_built_in(policy, "visible")
    return policy
