"""Snapshots of Python values: trees of nodes (`tensortap.core.record`) with memory of their own."""

from __future__ import annotations

from typing import Any

from tensortap.core.buffers import Pool
from tensortap.core.errors import CaptureError
from tensortap.core.record import Summary, Value
from tensortap.stats.columns import Memory
from tensortap.stats.digest import digest
from tensortap.values.adapters import CACHED, adapter_of
from tensortap.values.protocol import Snapshot, type_name


def snapshot(value: object, pool: Pool) -> Snapshot:
    """Copy a value; return the tree and the number of payload bytes in it.

    >>> snapshot({"loss": 0.5}, Pool())
    (Mapping(items=(('loss', 0.5),)), 12)
    """
    try:
        take = CACHED[type(value)].snapshot
    except KeyError:
        take = adapter_of(type(value)).snapshot
    return take(value, pool, ())


def borrow(value: object) -> Value:
    """Return the tree of a value whose large payloads are still the user's own memory."""
    return adapter_of(type(value)).snapshot(value, None, ())[0]


def nbytes_of(value: object) -> int:
    """Return the number of payload bytes that a snapshot of the value will hold.

    >>> nbytes_of([1.0, "ab"])
    10
    """
    return adapter_of(type(value)).nbytes(value, ())


def describe(value: object) -> tuple[str, str, tuple[int, ...]]:
    """Return the type, dtype and shape of a value as a record states them.

    >>> describe(0.5)
    ('builtins.float', '', ())
    """
    cls = type(value)
    return type_name(cls), *adapter_of(cls).describe(value)


def digest_of(value: object) -> bytes:
    """Return the digest that a snapshot of the value would have, without copying its memory.

    >>> from tensortap.core.record import Mapping
    >>> digest_of({"loss": 0.5}) == digest(Mapping((("loss", 0.5),)))
    True
    """
    return digest(borrow(value))


def memory_of(value: Any) -> Memory | None:
    """Return where the kernel finds the elements of a tensor; None if it cannot read them.

    >>> memory_of("text")
    """
    memory = adapter_of(type(value)).memory
    return None if memory is None else memory(value)


def summary_of(value: Any) -> Summary:
    """Return the statistics of a tensor."""
    summarize = adapter_of(type(value)).summarize
    if summarize is None:
        borrow(value)  # a tensor that cannot be captured raises here, with a remedy
        raise CaptureError(f"no statistics of a {type(value).__name__}: pass an array or a tensor")
    return summarize(value)
