"""Follow a path into a value: attributes, keys, indices, fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tensortap.sources.tracing.paths import ANY, MANY

_DEPTH = 20
_PLAIN = (str, bytes, bytearray, int, float, complex, type(None))


def reach(value: Any, segments: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every part of the value that the segments lead to, and by which way.

    >>> list(reach({"layers": [1.5, 2.5]}, ("layers", "1")))
    [(('layers', '1'), 2.5)]
    >>> list(reach({"a": 1, "b": 2}, ("*",)))
    [(('a',), 1), (('b',), 2)]
    """
    return _reach(value, segments, (), 0)


def _reach(
    value: Any, segments: tuple[str, ...], way: tuple[str, ...], depth: int
) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not segments:
        yield way, value
        return
    first, rest = segments[0], segments[1:]
    if first == MANY:
        if depth > _DEPTH:
            return
        there = list(parts(value))
        if rest:
            yield from _reach(value, rest, way, depth)
        elif not there:
            yield way, value  # the leaves alone: a container would be kept once a level
        for name, part in there:
            yield from _reach(part, segments, (*way, name), depth + 1)
    elif first == ANY:
        for name, part in parts(value):
            yield from _reach(part, rest, (*way, name), depth + 1)
    else:
        found, part = step(value, first)
        if found:
            yield from _reach(part, rest, (*way, first), depth + 1)


def step(value: Any, name: str) -> tuple[bool, Any]:
    """Whether there is a part of that name in a value, and the part.

    >>> step({3: "three"}, "3"), step((1, 2), "-1"), step(1j, "imag"), step([], "0")
    ((True, 'three'), (True, 2), (True, 1.0), (False, None))
    """
    number = _number(name)
    if isinstance(value, Mapping):
        if name in value:
            return True, value[name]
        if number is not None and number in value:
            return True, value[number]
        for key in value:  # keys that are neither: an enum, a tuple, a dtype
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
    """The named parts of a value: what ``*`` stands for. Numbers, text and tensors have none."""
    if isinstance(value, _PLAIN):
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
    elif not hasattr(type(value), "__array__") and not callable(value):
        yield from [
            (name, part)
            for name, part in list(getattr(value, "__dict__", {}).items())
            if not name.startswith("_")
        ]


def _number(text: str) -> int | None:
    return int(text) if text.removeprefix("-").isdecimal() else None
