"""Copies of traced values, and fingerprints that tell whether a value has changed."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Hashable, Iterable
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from xxhash import xxh3_128_digest

from tensortap.core.buffers import view_of
from tensortap.core.errors import CaptureError
from tensortap.core.record import Opaque, TensorData, Value
from tensortap.core.values import children
from tensortap.stats.digest import digest
from tensortap.values.adapters import adapter_of, safe_repr
from tensortap.values.protocol import SMALL, type_name
from tensortap.values.snapshot import borrow

_NOT_COPIED = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType, FrameType)
_MAX_OBJECTS = 100_000  # that are searched for tensors
_ATOMS = frozenset((int, float, complex, bool, str, bytes, type(None)))
KEYED: dict[type, Callable[[Any], tuple[Hashable, Any] | None]] = {}
"""Functions that copy a plain tensor and take its `fingerprint` in one go, by class.

They return None for tensors that need the general way.
"""
COMPACT: set[type] = set()
"""Classes of copies whose ``tensor()`` is the value."""


def keyed_copy(value: Any) -> tuple[Hashable, Any] | None:
    """Return the `fingerprint` of a plain tensor and a copy of it; None for any other value.

    The copy may be compact; `expanded` returns the tensor.
    """
    copy_of = KEYED.get(type(value))
    return None if copy_of is None else copy_of(value)


def expanded(kept: Any) -> Any:
    """Return a kept value as users see it."""
    return kept.tensor() if type(kept) in COMPACT else kept


def copied(value: Any) -> Any:
    """Return a copy that shares nothing with the value; tensors in it belong to no graph."""
    if type(value) in _ATOMS:
        return value
    copy_of = adapter_of(type(value)).copy
    return _copied_deeply(value) if copy_of is None else copy_of(value)


def _copied_deeply(value: Any) -> Any:
    if isinstance(value, (ModuleType, FrameType)):
        return Opaque(type_name(type(value)), safe_repr(value))
    if isinstance(value, _NOT_COPIED):
        return value  # through its globals a function holds the whole program
    memo: dict[int, Any] = {}
    for one in _objects_in(value):
        # deepcopy raises for a tensor that is no leaf of its graph
        copy_of = adapter_of(type(one)).copy
        if copy_of is not None:
            memo[id(one)] = copy_of(one)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a file, a socket: keep what is known of it
        return Opaque(type_name(type(value)), safe_repr(value))


def _objects_in(value: Any) -> Iterable[Any]:
    """Return all objects that a value refers to, directly or indirectly."""
    seen = {id(value)}
    objects = [value]
    for one in objects:
        if len(objects) > _MAX_OBJECTS:
            break
        for part in gc.get_referents(one):
            if id(part) not in seen and not isinstance(part, _NOT_COPIED):
                seen.add(id(part))
                objects.append(part)
    return objects


def fingerprint(value: Any) -> Hashable:
    """Return a key that is equal for equal content of the same type; None for other objects.

    Their repr may hide their content, so they count as changed.
    """
    kind = type(value)
    try:
        adapter = adapter_of(kind)
        node = borrow(value if adapter.local_shard is None else adapter.local_shard(value)[0])
    except CaptureError:
        node = Opaque("", "")
    if type(node) is TensorData:  # the common case: one call for all bytes
        data = view_of(node.data)
        # the same key as `keyed_copy` makes: one tensor may be compared in both ways
        key = bytes(data) if data.nbytes <= SMALL else xxh3_128_digest(data)
        return kind, node.dtype, node.shape, key
    return None if _has_opaque(node) else (kind, digest(node))


def _has_opaque(value: Value) -> bool:
    """Return whether a value contains an object of which only type and repr are known."""
    return isinstance(value, Opaque) or any(map(_has_opaque, children(value)))
