"""Renders entries and options as text, which `parse` reads back."""

import re
from collections.abc import Iterable

from ..mapping import DEFAULT_NOBODY
from ..prefetch import Limits
from ..probes import DEFAULT_ALARM
from .names import BYTES, LIMITS
from .options import DEFAULT_PREFETCH, Export, Options
from .values import UNITS

_LISTS = ("range_map", "cloak_list", "exempt", "views", "view_access")
_PLAIN = re.compile(r"[\w/.:@%+~=-]+")


def format_exports(exports: Iterable[Export]) -> str:
    """Return exports as the text of a file; parsing it yields equal exports again."""
    return "".join(f"{format_export(export)}\n" for export in exports)


def format_export(export: Export) -> str:
    """Return an export as one entry, without a line break at its end."""
    options = export.options
    between, inside = ",", " "
    if any(getattr(options, name) for name in _LISTS):
        between, inside = ", \\\n    ", " \\\n        "
    return f"{_quoted(export.path)} {export.client}({between.join(_items(options, inside))})"


def format_options(options: Options) -> str:
    """Return options as one line for ``mount -o``; parse_options yields equal options again."""
    return ",".join(_items(options, " "))


def _items(options: Options, space: str) -> list[str]:
    items = ["ro" if options.read_only else "rw"]
    if options.squash != "root":
        items.append({"none": "no_root_squash", "all": "all_squash"}[options.squash])
    if options.anonuid != DEFAULT_NOBODY:
        items.append(f"anonuid={options.anonuid}")
    if options.anongid != DEFAULT_NOBODY:
        items.append(f"anongid={options.anongid}")
    items += [name if value is None else f"{name}={_quoted(value)}" for name, value in options.other]
    for name, value in (("groups", options.groups), ("policy", options.policy)):
        if value is not None:
            items.append(f"{name}={_quoted(value)}")
    if options.no_client_cache:
        items.append("no_client_cache")
    if options.prefetch != DEFAULT_PREFETCH:
        items.append(f"prefetch={options.prefetch}")
    for name, limit in LIMITS.items():
        value = getattr(options.prefetch_limits, limit)
        if value != getattr(Limits(), limit):
            items.append(f"{name}={_with_unit(value) if name in BYTES else value}")
    if options.probe_alarm != DEFAULT_ALARM:
        items.append(f"probe_alarm={options.probe_alarm or 'off'}")
    if options.probe_delay:
        items.append(f"probe_delay={options.probe_delay}")
    for name in _LISTS:
        terms = getattr(options, name)
        if terms:
            items.append(space.join([f"{name} =", *map(str, terms)]))
    return items


def _with_unit(amount: int) -> str:
    for unit, factor in reversed(UNITS.items()):
        if amount % factor == 0 and amount:
            return f"{amount // factor}{unit}"
    return str(amount)


def _quoted(text: str) -> str:
    """Return text in a form that Scanner.string reads back: in quotes and with octal escapes if necessary."""
    if _PLAIN.fullmatch(text):
        return text
    parts = ['"']
    for character in text:
        if character.isprintable() and character not in '"\\':
            parts.append(character)
        else:
            parts += [f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogateescape")]
    return "".join([*parts, '"'])
