"""Loads plug-in policies: classes in a file, or in an installed module."""

import importlib
import inspect
import os
import sys
from types import ModuleType
from typing import Any

from ..config.options import Options
from ..messages import UserError
from ..policy import METHODS, Policy, may_hide


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
    policy.hides = may_hide(policy)
    return policy
