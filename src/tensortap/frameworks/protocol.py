"""The seam between the values of a framework and the neutral tree of `tensortap.record`.

Each framework has a module that gives an `Adapter` for a class of its own; `tree` asks them in
turn, once a class, and remembers the answer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from tensortap.buffers import Pool
from tensortap.errors import CaptureError
from tensortap.record import Shard, Summary, Value

SMALL = 16 << 10
"""Payloads up to this many bytes become `bytes`; larger ones are leased from the pool."""

Path: TypeAlias = tuple[int, ...]
"""The ids of the containers around a value: they tell a cycle, and how deep it lies."""

Taken: TypeAlias = tuple[Value, int]


@dataclass(frozen=True, slots=True)
class Adapter:
    """What can be done with the values of one class.

    `take` gives the neutral tree and how many payload bytes it holds, all copied; without a
    pool large payloads are borrowed instead: memory of the user, good until he changes it.
    `take_small`, where there is one, is `take` for the shortest way: None if it is not small.
    `summarize`, where there is one, is the statistics without a copy. `local` gives this rank's
    part of a value that is spread over ranks, and which part it is.
    """

    take: Callable[[Any, Pool | None, Path], Taken]
    nbytes: Callable[[Any, Path], int]
    describe: Callable[[Any], tuple[str, tuple[int, ...]]]
    take_small: Callable[[Any], Taken | None] | None = None
    summarize: Callable[[Any], Summary] | None = None
    local: Callable[[Any], tuple[Any, Shard]] | None = None


def undescribed(value: object) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape of what has none."""
    return "", ()


def refusing(message: str) -> Adapter:
    """The adapter of a class whose values can't be caught."""

    def take(value: Any, pool: Pool | None, path: Path) -> Taken:
        raise CaptureError(message)

    return Adapter(take, lambda value, path: 0, undescribed)


def type_name(cls: type) -> str:
    """The full name of a class.

    >>> type_name(float)
    'builtins.float'
    """
    return f"{cls.__module__}.{cls.__qualname__}"


_readers: dict[int, Callable[[int], Any]] = {}


def read(address: int, nbytes: int) -> bytes:
    """A copy of a few bytes of memory: a fifth of the time of `ctypes.string_at`."""
    reader = _readers.get(nbytes)
    if reader is None:
        if len(_readers) >= 256:  # a class per size: not for every size there is
            return ctypes.string_at(address, nbytes)
        reader = _readers[nbytes] = (ctypes.c_char * nbytes).from_address
    raw: bytes = reader(address).raw
    return raw


_view_memory = ctypes.pythonapi["PyMemoryView_FromMemory"]
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]


def borrow(address: int, nbytes: int) -> memoryview:
    """The memory itself, read-only; whoever asks keeps its owner alive."""
    view: memoryview = _view_memory(address, nbytes, 0x100)
    return view


def keep(address: int, nbytes: int, pool: Pool | None) -> Any:
    """A copy of contiguous memory, as `TensorData.data` (borrowed where there is no pool)."""
    if nbytes <= SMALL:
        return read(address, nbytes) if nbytes else b""
    if pool is None:
        return borrow(address, nbytes)
    lease = pool.acquire(nbytes)
    ctypes.memmove(lease.address, address, nbytes)  # without the GIL
    return lease
