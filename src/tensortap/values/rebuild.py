"""The values that snapshots were taken of, rebuilt as copies that belong to the caller.

Nothing that a message says is run or looked up: a namedtuple or a dataclass comes back in a class
of our own with the same name and fields.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import keyword
import re
from collections.abc import Callable
from typing import Any

from tensortap.core.errors import WireError
from tensortap.core.record import Blob, Fields, Mapping, Number, Opaque, TensorData, Value
from tensortap.core.values import DEPTH
from tensortap.values.registry import framework_named

_HEX = re.compile(r"-?0x[0-9a-f]+")
_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def rebuild(value: Value, depth: int = 0) -> Any:
    """Return the value that a snapshot was taken of; changing it changes no history.

    Tensors come back in their framework if it can be imported, else as NumPy arrays. An object of
    which only the repr was kept comes back as its `Opaque`.

    >>> from tensortap.core.record import Items
    >>> rebuild(Items("tuple", (1, 2.5)))
    (1, 2.5)
    """
    if value is None or isinstance(value, (bool, int, float, str, Opaque)):
        return value
    if isinstance(value, TensorData):
        return _builder(value.framework)(value)
    if isinstance(value, Number):
        return _number(value)
    if isinstance(value, Blob):
        return bytearray(value.data) if value.kind == "bytearray" else value.data
    if depth >= DEPTH:
        raise WireError(f"value is nested deeper than {DEPTH} containers")
    depth += 1
    if isinstance(value, Fields):
        return _fields(value, [rebuild(part, depth) for part in value.values])
    try:
        if isinstance(value, Mapping):
            return {rebuild(key, depth): rebuild(part, depth) for key, part in value.items}
        if value.kind in _ITEMS:
            return _ITEMS[value.kind]([rebuild(part, depth) for part in value.items])
    except TypeError as error:
        raise WireError(f"unhashable key of a dict or member of a set: {error}") from None
    raise WireError(f"no container is called {value.kind[:40]!r}")


def _number(value: Number) -> complex | int:
    if value.kind == "complex" and len(value.parts) == 2:
        return complex(*value.parts)
    if value.kind == "int" and _HEX.fullmatch(value.text):
        return int(value.text, 16)
    raise WireError(f"not a number: {value.kind[:40]!r}")


@functools.cache
def _builder(framework: str) -> Callable[[TensorData], Any]:
    try:
        return framework_named("numpy" if framework == "numpy.generic" else framework).rebuild
    except WireError:
        raise
    except Exception:  # not installed, or broken: NumPy can hold the numbers
        return framework_named("numpy").rebuild


def _fields(value: Fields, parts: list[Any]) -> Any:
    if value.kind == "namedtuple":
        rebuilt: Any = tuple.__new__(_class_like(value.kind, value.type, value.names), parts)
        return rebuilt
    if value.kind != "dataclass":
        raise WireError(f"neither a namedtuple nor a dataclass: {value.type[:80]!r}")
    rebuilt = object.__new__(_class_like(value.kind, value.type, value.names))
    vars(rebuilt).update(zip(value.names, parts, strict=True))
    return rebuilt


@functools.lru_cache(maxsize=256)
def _class_like(kind: str, name: str, fields: tuple[str, ...]) -> type:
    """Return a class of our own with this name and these fields: the user's might run code."""
    name = name.rpartition(":")[2].rpartition(".")[2]
    name = name if name.isidentifier() and not keyword.iskeyword(name) else "Unnamed"
    try:  # both check the names
        if any(field.startswith("__") for field in fields):
            raise ValueError("names of Python itself")
        if kind == "namedtuple":
            return collections.namedtuple(name, fields)
        return dataclasses.make_dataclass(name, fields, unsafe_hash=True)
    except (TypeError, ValueError, SyntaxError) as error:
        raise WireError(f"not the fields of a {kind}: {', '.join(fields)[:80]} ({error})") from None
