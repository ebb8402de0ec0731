"""Any Python value as the neutral tree of `tensortap.record`, copied at once.

The adapter of a class is found once and remembered: this runs in the training thread for every
capture. Frameworks are looked for in `sys.modules`, never imported to look at a value.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Callable, Iterable
from typing import Any

from tensortap.buffers import Pool
from tensortap.errors import CaptureError
from tensortap.frameworks import scalars
from tensortap.frameworks.protocol import Adapter, Path, Taken, type_name, undescribed
from tensortap.record import Fields, Items, Mapping, Value

DEPTH = 100
"""Containers may lie this deep in one another."""

_known: dict[type, Adapter] = dict(scalars.SCALARS)


def snapshot(value: object, pool: Pool) -> Taken:
    """The value as a neutral tree, all its bytes copied, and how many they are.

    >>> snapshot({"loss": 0.5}, Pool())
    (Mapping(items=(('loss', 0.5),)), 12)
    """
    try:
        take = _known[type(value)].take
    except KeyError:
        take = adapter_of(type(value)).take
    return take(value, pool, ())


def borrow(value: object) -> Value:
    """The value as a neutral tree whose large payloads are still the user's own memory."""
    return adapter_of(type(value)).take(value, None, ())[0]


def nbytes_of(value: object) -> int:
    """How many payload bytes a snapshot of the value will hold.

    >>> nbytes_of([1.0, "ab"])
    10
    """
    return adapter_of(type(value)).nbytes(value, ())


def describe(value: object) -> tuple[str, str, tuple[int, ...]]:
    """The type, dtype and shape that a record of the value says.

    >>> describe(0.5)
    ('builtins.float', '', ())
    """
    cls = type(value)
    return type_name(cls), *adapter_of(cls).describe(value)


def adapter_of(cls: type) -> Adapter:
    """The adapter for the values of a class."""
    found = _known.get(cls)
    if found is None:
        found = _find(cls)
        if len(_known) >= 4096:  # a program that makes classes without end must not fill memory
            _known.clear()
            _known.update(scalars.SCALARS)
        _known[cls] = found
    return found


def _find(cls: type) -> Adapter:
    for framework in (_torch, _jax, _numpy):
        found = framework(cls)
        if found is not None:
            return found
    return _container(cls) or scalars.adapter(cls) or scalars.OPAQUE


# each adapter imports its framework, which is there already; one that is still being imported
# by another thread has no values yet


def _torch(cls: type) -> Adapter | None:
    if not hasattr(sys.modules.get("torch"), "Tensor"):
        return None
    from tensortap.frameworks.torch.adapter import adapter

    return adapter(cls)


def _jax(cls: type) -> Adapter | None:
    if not hasattr(sys.modules.get("jax"), "Array"):
        return None
    from tensortap.frameworks.jax.adapter import adapter

    return adapter(cls)


def _numpy(cls: type) -> Adapter | None:
    if not hasattr(sys.modules.get("numpy"), "ndarray"):
        return None
    from tensortap.frameworks.numpy.adapter import adapter

    return adapter(cls)


def _container(cls: type) -> Adapter | None:
    mro = cls.__mro__
    # a dict first: some classes are a dict and a dataclass, and only the dict can be rebuilt
    if dict in mro:
        return _MAPPING
    if tuple in mro and isinstance(getattr(cls, "_fields", None), tuple):
        return _NAMEDTUPLE
    for base, found in _ITEMS.items():
        if base in mro:
            return found
    return _DATACLASS if dataclasses.is_dataclass(cls) else None


def _enter(value: object, path: Path) -> Path:
    here = id(value)
    if here in path:
        raise CaptureError("it contains itself: catch its parts")
    if len(path) >= DEPTH:
        raise CaptureError(f"it lies deeper than {DEPTH} containers: catch its parts")
    return (*path, here)


class _Inside(CaptureError):
    """A part of a container could not be caught: where it is, and why."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"at {where}: {why}")
        self.where = where
        self.why = why


def _inside(error: CaptureError, piece: str) -> _Inside:
    if isinstance(error, _Inside):
        return _Inside(piece + error.where, error.why)
    return _Inside(piece, str(error))


def _subscript(key: object) -> str:
    return f"[{scalars.safe_repr(key, 60)}]"


def _attribute(name: object) -> str:
    return f".{name}"


def _take_all(
    parts: Iterable[tuple[object, object]],
    spell: Callable[[object], str],
    pool: Pool | None,
    path: Path,
) -> tuple[list[Value], int]:
    values: list[Value] = []
    total = 0
    for key, part in parts:
        try:
            node, nbytes = adapter_of(type(part)).take(part, pool, path)
        except CaptureError as error:
            raise _inside(error, spell(key)) from None
        values.append(node)
        total += nbytes
    return values, total


def _items(kind: str, contents: Callable[[Any], list[object]]) -> Adapter:
    def take(value: Any, pool: Pool | None, path: Path) -> Taken:
        path = _enter(value, path)
        nodes, total = _take_all(enumerate(contents(value)), _subscript, pool, path)
        return Items(kind, tuple(nodes)), total

    return Adapter(take, lambda value, path: _sum(value, contents(value), path), undescribed)


def _sum(whole: object, parts: Iterable[object], path: Path) -> int:
    # what contains itself, or lies too deep, is refused by `take`; here it must only end
    if len(path) >= DEPTH or id(whole) in path:
        return 0
    path = (*path, id(whole))
    return sum([adapter_of(type(part)).nbytes(part, path) for part in parts])


def _take_mapping(value: Any, pool: Pool | None, path: Path) -> Taken:
    path = _enter(value, path)
    # a list at once: other threads may change the dict meanwhile
    pairs = list(dict.items(value))
    keys, key_bytes = _take_all([(key, key) for key, _ in pairs], _subscript, pool, path)
    values, value_bytes = _take_all(pairs, _subscript, pool, path)
    return Mapping(tuple(zip(keys, values, strict=True))), key_bytes + value_bytes


def _mapping_nbytes(value: Any, path: Path) -> int:
    return _sum(value, [part for pair in list(dict.items(value)) for part in pair], path)


def class_path(cls: type) -> str:
    """How `Fields.type` names a class: module and qualified name."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _fields(kind: str, contents: Callable[[Any], dict[str, object]]) -> Adapter:
    def take(value: Any, pool: Pool | None, path: Path) -> Taken:
        path = _enter(value, path)
        parts = contents(value)
        nodes, total = _take_all(parts.items(), _attribute, pool, path)
        return Fields(kind, class_path(type(value)), tuple(parts), tuple(nodes)), total

    def nbytes(value: Any, path: Path) -> int:
        return _sum(value, contents(value).values(), path)

    return Adapter(take, nbytes, undescribed)


def _namedtuple_contents(value: Any) -> dict[str, object]:
    return dict(zip(type(value)._fields, tuple.__iter__(value), strict=False))


def _dataclass_contents(value: Any) -> dict[str, object]:
    names = [field.name for field in dataclasses.fields(value)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


_MAPPING = Adapter(_take_mapping, _mapping_nbytes, undescribed)
_NAMEDTUPLE = _fields("namedtuple", _namedtuple_contents)
_DATACLASS = _fields("dataclass", _dataclass_contents)
_ITEMS: dict[type, Adapter] = {
    list: _items("list", lambda value: list(list.__iter__(value))),
    tuple: _items("tuple", lambda value: list(tuple.__iter__(value))),
    set: _items("set", lambda value: list(set.__iter__(value))),
    frozenset: _items("frozenset", lambda value: list(frozenset.__iter__(value))),
    collections.deque: _items("list", lambda value: list(collections.deque.__iter__(value))),
}
