"""Paths of `trace`: parse them, match their segments, follow them into a value.

Segments are separated by dots; ``*`` stands for any one segment. This module, and every module
that instruments functions, imports only the standard library.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

ANY = "*"

_SEGMENT = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^."']+))\s*(?:\.|$)""")
_FUNCTIONS = (type, FunctionType, MethodType, BuiltinFunctionType)
_WITHOUT_PARTS = (str, bytes, bytearray, int, float, complex, type(None), *_FUNCTIONS)


def parse(path: str) -> tuple[str, ...]:
    """Return the segments of a path; a key that contains dots is quoted.

    >>> parse("blocks.*.forward.out.'a.b'")
    ('blocks', '*', 'forward', 'out', 'a.b')
    """
    if not isinstance(path, str):
        raise TypeError(f"a path must be a string like 'blocks.*.forward.x', got {path!r:.80}")
    segments: list[str] = []
    position = 0
    while position < len(path):
        match = _SEGMENT.match(path, position)
        if match is None or (match.group(3) is not None and not match.group(3).strip()):
            break
        segments.append(next(text for text in match.groups() if text is not None).strip())
        position = match.end()
    bad = not segments or path.rstrip().endswith(".") or "**" in segments
    if position < len(path) or bad:
        raise ValueError(
            f"{path!r} is not a path: separate segments with single dots, like 'forward.x'; "
            "'*' stands for one, like 'blocks.*.forward.x'"
        )
    return tuple(segments)


def join(segments: Iterable[str]) -> str:
    """Return the path that consists of the segments."""
    return ".".join([f"'{text}'" if "." in text else text for text in segments])


def nearest(name: str, available: Iterable[str], most: int = 6) -> str:
    """Return a phrase that lists what exists instead of a name, the most similar first."""
    names = list(dict.fromkeys(available))
    if not names:
        return "it has none"
    close = difflib.get_close_matches(name, names, n=most, cutoff=0.5)
    ordered = [*close, *[other for other in names if other not in close]]
    more = " …" if len(ordered) > most else ""
    return "it has " + ", ".join(repr(one) for one in ordered[:most]) + more


def follow(
    value: Any, segments: tuple[str, ...], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every part of the value that the segments lead to, with its path.

    A last ``*`` leaves out modules: copying them would copy the model.

    >>> list(follow({"layers": [1.5, 2.5]}, ("layers", "1")))
    [(('layers', '1'), 2.5)]
    >>> list(follow({"a": 1, "b": 2}, ("*",)))
    [(('a',), 1), (('b',), 2)]
    """
    if not segments:
        yield path, value
        return
    first, rest = segments[0], segments[1:]
    if first == ANY:
        for name, part in parts(value):
            if rest or not is_module(part):
                yield from follow(part, rest, (*path, name))
    else:
        exists, part = part_named(value, first)
        if exists:
            yield from follow(part, rest, (*path, first))


def part_named(value: Any, name: str) -> tuple[bool, Any]:
    """Return whether a value has a part of that name, and the part."""
    number = int(name) if name.removeprefix("-").isdecimal() else None
    if isinstance(value, Mapping):
        if name in value:
            return True, value[name]
        if number is not None and number in value:
            return True, value[number]
        for key in value:  # neither a string nor a number: an enum, a tuple, a dtype
            if str(key) == name:
                return True, value[key]
    elif number is not None and hasattr(type(value), "__getitem__"):
        if isinstance(value, (str, bytes)):
            return False, None
        try:
            return True, value[number]
        except (LookupError, TypeError, ValueError):
            return False, None
    try:
        return True, getattr(value, name)
    except AttributeError:
        return False, None


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the named parts of a value, which ``*`` stands for; tensors and text have none."""
    if isinstance(value, _WITHOUT_PARTS):
        return
    if isinstance(value, Mapping):
        yield from [(str(key), part) for key, part in value.items()]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                yield field.name, getattr(value, field.name)
    elif isinstance(value, Sequence):
        names = getattr(value, "_fields", None) or range(len(value))
        yield from [(str(name), part) for name, part in zip(names, value, strict=False)]
    elif not hasattr(type(value), "__array__"):
        attributes = list(getattr(value, "__dict__", {}).items())
        yield from [pair for pair in attributes if not pair[0].startswith("_")]
        if is_module(value):
            yield from value.named_parameters(recurse=False)
            yield from value.named_buffers(recurse=False)
            yield from value.named_children()


def is_module(value: Any) -> bool:
    """Return whether a value is a module of torch, which has parts that are no attributes."""
    return hasattr(type(value), "named_children")
