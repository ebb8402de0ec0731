"""The adapter of every class: of a framework, of containers, of plain values.

An adapter is looked up once per class and cached: snapshots are taken in the training thread.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Iterable
from typing import Any

from tensortap.core.buffers import Pool
from tensortap.core.errors import CaptureError
from tensortap.core.record import Blob, Fields, Items, Mapping, Number, Opaque, Value
from tensortap.core.values import DEPTH
from tensortap.values.protocol import Adapter, Framework, Path, Snapshot, type_name
from tensortap.values.registry import loaded_frameworks, offered_frameworks

_REPR = 500  # characters of an object's repr that are kept


def adapter_of(cls: type) -> Adapter:
    """Return the adapter for the values of a class."""
    adapter = CACHED.get(cls)
    if adapter is None:
        adapter = _of(loaded_frameworks(), cls) or _container(cls) or _scalar(cls)
        # last: to search for other packages takes milliseconds
        adapter = adapter or _of(offered_frameworks(), cls) or _OPAQUE
        if len(CACHED) >= 4096:
            CACHED.clear()
            CACHED.update(_SCALARS)
        CACHED[cls] = adapter
    return adapter


def _of(frameworks: Iterable[Framework], cls: type) -> Adapter | None:
    """Return the adapter of the first framework that knows a class."""
    return next(filter(None, (framework.adapter(cls) for framework in frameworks)), None)


def _container(cls: type) -> Adapter | None:
    mro = cls.__mro__
    # dict first: some classes are a dict and a dataclass, and only the dict can be rebuilt
    if dict in mro:
        return _MAPPING
    if tuple in mro and isinstance(getattr(cls, "_fields", None), tuple):
        return _NAMEDTUPLE
    for base, adapter in _ITEMS.items():
        if base in mro:
            return adapter
    return _DATACLASS if dataclasses.is_dataclass(cls) else None


def safe_repr(value: object, limit: int = _REPR) -> str:
    """Return the repr of any object, truncated and valid in UTF-8, even if its own code raises."""
    try:
        text = repr(value)
    except Exception as error:  # the user's code
        text = f"<repr raised {type(error).__name__}>"
    return text[:limit].encode("utf-8", "backslashreplace").decode()[:limit]


# -- plain values ----------------------------------------------------------------------


def _unchanged(nbytes: int) -> Adapter:
    return Adapter(lambda value, pool, path: (value, nbytes), lambda value, path: nbytes)


def _adapter(node: Callable[[Any], Value], nbytes: Callable[[Any], int]) -> Adapter:
    return Adapter(
        lambda value, pool, path: (node(value), nbytes(value)), lambda value, path: nbytes(value)
    )


def _snapshot_int(value: int, pool: Pool | None = None, path: Path = ()) -> Snapshot:
    if -0x8000000000000000 <= value <= 0x7FFFFFFFFFFFFFFF:
        return value, 8
    # hex: decimal text takes quadratic time, and Python limits it to 4300 digits
    return Number("int", text=hex(value)), (value.bit_length() + 7) // 8


def _snapshot_str(value: str, pool: Pool | None = None, path: Path = ()) -> Snapshot:
    try:
        return value, len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError:  # neither a message nor a file can carry lone surrogates
        return Opaque("builtins.str", repr(value)[:_REPR]), 0


_SCALARS: dict[type, Adapter] = {
    type(None): _unchanged(0),
    bool: _unchanged(1),
    int: Adapter(_snapshot_int, lambda value, path: _snapshot_int(value)[1],
                 snapshot_small=_snapshot_int),
    float: _unchanged(8),
    complex: _adapter(lambda value: Number("complex", (value.real, value.imag)), lambda value: 16),
    str: Adapter(_snapshot_str, lambda value, path: _snapshot_str(value)[1]),
    bytes: _adapter(lambda value: Blob("bytes", value), len),
    bytearray: _adapter(lambda value: Blob("bytearray", bytes(value)), len),
}  # fmt: skip

_OPAQUE = _adapter(lambda value: Opaque(type_name(type(value)), safe_repr(value)), lambda value: 0)

# the plain value of an instance of a subclass, without running code of the subclass
_PLAIN: dict[type, Any] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: lambda value: bytes(memoryview(value)),
    bytearray: lambda value: bytearray(memoryview(value)),
}


def _scalar(cls: type) -> Adapter | None:
    """Return the adapter for a class of plain values; a subclass is captured as its base."""
    if enum.Enum in cls.__mro__:
        return _OPAQUE  # the name of a member says more than its value
    base = next((base for base in _PLAIN if base in cls.__mro__), None)
    if base is None:
        return None
    plain, adapter = _PLAIN[base], _SCALARS[base]
    return Adapter(
        lambda value, pool, path: adapter.snapshot(plain(value), pool, path),
        lambda value, path: adapter.nbytes(plain(value), path),
    )


CACHED: dict[type, Adapter] = dict(_SCALARS)
"""The adapters that have been looked up."""


# -- containers ------------------------------------------------------------------------


class _PartError(CaptureError):
    """A part of a container that cannot be captured: where it is, and why."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"at {where}: {reason}")
        self.where = where
        self.reason = reason


def _snapshot_parts(
    parts: Iterable[tuple[object, object]],
    spell: Callable[[object], str],
    pool: Pool | None,
    path: Path,
) -> tuple[list[Value], int]:
    values: list[Value] = []
    total = 0
    for key, part in parts:
        try:
            node, nbytes = adapter_of(type(part)).snapshot(part, pool, path)
        except _PartError as error:
            raise _PartError(spell(key) + error.where, error.reason) from None
        except CaptureError as error:
            raise _PartError(spell(key), str(error)) from None
        values.append(node)
        total += nbytes
    return values, total


def _enter(value: object, path: Path) -> Path:
    here = id(value)
    if here in path:
        raise CaptureError("it contains itself: catch its parts")
    if len(path) >= DEPTH:
        raise CaptureError(f"it is nested deeper than {DEPTH} containers: catch its parts")
    return (*path, here)


def _sum(whole: object, parts: Iterable[object], path: Path) -> int:
    # `snapshot` raises for cycles and for deep nesting; here the recursion only has to end
    if len(path) >= DEPTH or id(whole) in path:
        return 0
    path = (*path, id(whole))
    return sum([adapter_of(type(part)).nbytes(part, path) for part in parts])


def _subscript(key: object) -> str:
    return f"[{safe_repr(key, 60)}]"


def _items(kind: str, iterate: Callable[[Any], Iterable[object]]) -> Adapter:
    def snapshot(value: Any, pool: Pool | None, path: Path) -> Snapshot:
        path = _enter(value, path)
        parts = enumerate(list(iterate(value)))
        nodes, total = _snapshot_parts(parts, _subscript, pool, path)
        return Items(kind, tuple(nodes)), total

    def nbytes(value: Any, path: Path) -> int:
        return _sum(value, list(iterate(value)), path)

    return Adapter(snapshot, nbytes)


def _snapshot_mapping(value: Any, pool: Pool | None, path: Path) -> Snapshot:
    path = _enter(value, path)
    pairs = list(dict.items(value))  # at once: other threads may change the dict
    keys, key_bytes = _snapshot_parts([(key, key) for key, _ in pairs], _subscript, pool, path)
    values, value_bytes = _snapshot_parts(pairs, _subscript, pool, path)
    return Mapping(tuple(zip(keys, values, strict=True))), key_bytes + value_bytes


def _mapping_nbytes(value: Any, path: Path) -> int:
    return _sum(value, [part for pair in list(dict.items(value)) for part in pair], path)


def _fields(kind: str, contents: Callable[[Any], dict[str, object]]) -> Adapter:
    def snapshot(value: Any, pool: Pool | None, path: Path) -> Snapshot:
        path = _enter(value, path)
        parts = contents(value)
        nodes, total = _snapshot_parts(parts.items(), ".{}".format, pool, path)
        cls = type(value)
        name = f"{cls.__module__}:{cls.__qualname__}"
        return Fields(kind, name, tuple(parts), tuple(nodes)), total

    def nbytes(value: Any, path: Path) -> int:
        return _sum(value, contents(value).values(), path)

    return Adapter(snapshot, nbytes)


def _namedtuple_contents(value: Any) -> dict[str, object]:
    return dict(zip(type(value)._fields, tuple.__iter__(value), strict=False))


def _dataclass_contents(value: Any) -> dict[str, object]:
    names = [field.name for field in dataclasses.fields(value)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


_MAPPING = Adapter(_snapshot_mapping, _mapping_nbytes)
_NAMEDTUPLE = _fields("namedtuple", _namedtuple_contents)
_DATACLASS = _fields("dataclass", _dataclass_contents)
_ITEMS: dict[type, Adapter] = {
    list: _items("list", list.__iter__),
    tuple: _items("tuple", tuple.__iter__),
    set: _items("set", set.__iter__),
    frozenset: _items("frozenset", frozenset.__iter__),
    collections.deque: _items("list", collections.deque.__iter__),
}
