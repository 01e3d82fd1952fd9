"""What a policy decides, the built-in one (range-mapping and cloaking), and plug-ins.

A plug-in is a small class. It may define any of the methods of `Policy`; what it leaves out, the built-in policy
does as the export's options say. Deriving from `Policy` works as well, and gives `super()`.
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
from .ids import ClientId, ServerId
from .mapping import IdMap, Kind


def _mode_bits(caller: Caller, attrs: "Attrs", mode: int) -> bool:
    """Access by mode bits alone, with root's privileges as in capabilities(7), CAP_DAC_OVERRIDE."""
    if caller.uid == 0:
        granted = 7 if attrs.mode & 0o111 or stat.S_ISDIR(attrs.mode) else 6
    elif caller.uid == attrs.uid:
        granted = attrs.mode >> 6
    else:
        granted = attrs.mode >> 3 if attrs.gid in caller.groups else attrs.mode
    return mode & ~granted == 0


# Not frozen: that would triple the price of one, and one is made for every name of every listing.
@dataclass(slots=True)
class Attrs:
    """What a policy may know of one object of the real tree; ids are server ids, except in what `Policy.show` answers.

    Attributes:
        name: the last component of the path it was reached by ("" for the root of the export); bytes that
            are not UTF-8 are surrogate-escaped.
        mode: type and permission bits, as in stat(2).
        uid: the owner.
        gid: the group.
        size: in bytes.
        nlink: hard links.
        mtime_ns: last modification, nanoseconds since the epoch.
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
        """Would the kernel let `caller` (server ids) access the object (4 read, 2 write, 1 execute)?

        Mode bits and ACLs of the real tree, as faccessat2(2) with AT_EACCESS sees them. For an object that is
        only about to be made, the mode bits it will have.
        """
        if self._access is None:
            return _mode_bits(caller, self, mode)
        return self._access(caller, mode)


class Policy:
    """The built-in policy: `range_map` and `cloak_list` of an export [SZ §2].

    Args:
        options: the export's options; the default is an export without any.

    Attributes:
        hides: False promises that `visible` is always True, so that nobody has to ask.
    """

    def __init__(self, options: Options | None = None) -> None:
        options = options or Options()
        self.options = options
        self.ids: dict[Kind, IdMap] = {
            "uid": IdMap(
                [d for d in options.range_map if d.kind == "uid"],
                nobody=options.anonuid,
                squash=options.squash,
            ),
            "gid": IdMap(
                [d for d in options.range_map if d.kind == "gid"],
                nobody=options.anongid,
                squash=options.squash,
            ),
        }
        self.cloak = CloakList(options.cloak_list, nobody_uid=options.anonuid, nobody_gid=options.anongid)
        self.hides = self.cloak.hides or not is_built_in(self, "visible")

    def forward(self, caller: ClientCaller) -> Caller:
        """The server's identity for a caller."""
        gids = self.ids["gid"]
        gid = gids.forward(caller.gid)
        return Caller(self.ids["uid"].forward(caller.uid), gid, gids.groups(caller.groups - {caller.gid}) | {gid})

    def visible(self, caller: Caller, attrs: Attrs) -> bool:
        """May `caller` (server ids) know that this object exists? The root of an export is never asked about."""
        return self.cloak.visible(attrs.mode, attrs.uid, attrs.gid, caller.uid, caller.groups)

    def show(self, attrs: Attrs) -> Attrs:
        """The attributes as the client's world sees them; mode, uid and gid are heeded, and these are client ids."""
        shown: dict[str, Any] = {"uid": self.client_id("uid", attrs.uid), "gid": self.client_id("gid", attrs.gid)}
        return replace(attrs, **shown)

    def same_for_all(self, attrs: Attrs) -> bool:
        """Is the answer of `visible` the same for every caller? False when in doubt."""
        return is_built_in(self, "visible") and self.cloak.same_for_all(attrs.mode, attrs.uid, attrs.gid)

    def server_id(self, kind: Kind, client_id: ClientId) -> ServerId | None:
        """The server id for chown and ACL entries; None has the request refused with EINVAL."""
        return self.ids[kind].counterpart(client_id, "forward")

    def client_id(self, kind: Kind, server_id: ServerId) -> ClientId:
        """The client id that is shown for a server id in attributes and ACL entries; nobody's if there is none."""
        return self.ids[kind].reverse(server_id)


METHODS = ("forward", "visible", "show", "same_for_all", "server_id", "client_id")
"""What a plug-in may define."""


def is_built_in(policy: Policy, method: str) -> bool:
    """Does `policy` leave this method to the built-in policy?"""
    return getattr(type(policy), method) is getattr(Policy, method) and method not in vars(policy)


class PolicyError(ValueError):
    """A plug-in cannot be loaded; the text is one line that says why."""


def is_in_file(spec: str | None) -> bool:
    """Does `spec` name a FILE, which is read anew each time, and no installed module?"""
    return spec is not None and spec.rpartition(":")[0].endswith(".py")


def load_policy(spec: str | None, options: Options, directory: str = ".") -> Policy:
    """The policy that `spec` names, for an export with `options`.

    Args:
        spec: None for the built-in one, `FILE.py:Class`, or `package.module:Class`.
        options: the export's; handed to the class if its constructor takes an argument.
        directory: what a relative FILE is relative to.

    Raises:
        PolicyError: no such file, module or class, or it failed while loading.
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
        # One line: what a plug-in says may have several.
        raise PolicyError(f"policy={spec}: {type(exc).__name__}: {' '.join(str(exc).split())}") from exc
    return plugin


def _run(path: str) -> ModuleType:
    """The module in a file: always what is in it now, whereas Python's cache of bytecode looks at whole seconds."""
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    module = ModuleType(f"cloakfs_policy_{os.path.basename(path).removesuffix('.py')}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # where dataclasses look for it
    exec(code, vars(module))
    return module


def _adopt(plugin: Any, options: Options) -> Policy:
    """The built-in policy with the methods that `plugin` defines in place of its own."""
    policy = Policy(options)
    for method in METHODS:
        if hasattr(plugin, method):
            setattr(policy, method, getattr(plugin, method))
    policy.hides = policy.hides or not is_built_in(policy, "visible")
    return policy
