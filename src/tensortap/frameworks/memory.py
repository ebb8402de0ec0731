"""Copies of memory that is known by its address."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from tensortap.buffers import Pool
from tensortap.frameworks.protocol import SMALL

_readers: dict[int, Callable[[int], Any]] = {}


def read(address: int, nbytes: int) -> bytes:
    """Return a copy of a few bytes, five times as fast as `ctypes.string_at`."""
    reader = _readers.get(nbytes)
    if reader is None:
        if len(_readers) >= 256:  # ctypes makes one class per size and keeps it
            return ctypes.string_at(address, nbytes)
        reader = _readers[nbytes] = (ctypes.c_char * nbytes).from_address
    raw: bytes = reader(address).raw
    return raw


_view_memory = ctypes.pythonapi["PyMemoryView_FromMemory"]
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]


def borrow(address: int, nbytes: int) -> memoryview:
    """Return a read-only view of the memory; the caller keeps its owner alive."""
    view: memoryview = _view_memory(address, nbytes, 0x100)
    return view


def payload_at(address: int, nbytes: int, pool: Pool | None) -> Any:
    """Return a copy of contiguous memory as `TensorData.data`; borrow it if there is no pool."""
    if nbytes <= SMALL:
        return read(address, nbytes) if nbytes else b""
    if pool is None:
        return borrow(address, nbytes)
    lease = pool.acquire(nbytes)
    ctypes.memmove(lease.address, address, nbytes)  # releases the GIL
    return lease
