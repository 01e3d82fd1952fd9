"""Renders entries and options as text, which `parse` reads back."""

import re
from collections.abc import Iterable, Iterator

from ..mapping import DEFAULT_NOBODY
from ..prefetch import Limits
from ..probes import DEFAULT_ALARM
from .optionnames import BYTES, LIMITS
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
    """Return the options that differ from what applies without them; `space` stands between the terms of a list."""
    words = (("groups", options.groups), ("policy", options.policy))
    lists = ((name, getattr(options, name)) for name in _LISTS)
    return [
        "ro" if options.read_only else "rw",
        *_squash_items(options),
        *(name if value is None else f"{name}={_quoted(value)}" for name, value in options.other),
        *(f"{name}={_quoted(value)}" for name, value in words if value is not None),
        *["no_client_cache"] * options.no_client_cache,
        *_prefetch_items(options),
        *_probe_items(options),
        *(space.join([f"{name} =", *map(str, terms)]) for name, terms in lists if terms),
    ]


def _squash_items(options: Options) -> Iterator[str]:
    if options.squash != "root":
        yield {"none": "no_root_squash", "all": "all_squash"}[options.squash]
    if options.anonuid != DEFAULT_NOBODY:
        yield f"anonuid={options.anonuid}"
    if options.anongid != DEFAULT_NOBODY:
        yield f"anongid={options.anongid}"


def _prefetch_items(options: Options) -> Iterator[str]:
    if options.prefetch != DEFAULT_PREFETCH:
        yield f"prefetch={options.prefetch}"
    for name, limit in LIMITS.items():
        value = getattr(options.prefetch_limits, limit)
        if value != getattr(Limits(), limit):
            yield f"{name}={_with_unit(value) if name in BYTES else value}"


def _probe_items(options: Options) -> Iterator[str]:
    if options.probe_alarm != DEFAULT_ALARM:
        yield f"probe_alarm={options.probe_alarm or 'off'}"
    if options.probe_delay:
        yield f"probe_delay={options.probe_delay}"


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
