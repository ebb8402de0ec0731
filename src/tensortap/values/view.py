"""Memory of tensors: as NumPy arrays without a copy, and copied from an address."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tensortap.core.buffers import Pool, view_of
from tensortap.core.dtypes import numpy_dtype
from tensortap.core.record import Record, TensorData
from tensortap.values.adapters import adapter_of
from tensortap.values.protocol import SMALL
from tensortap.values.snapshot import borrow

if TYPE_CHECKING:
    from numpy.typing import NDArray


def as_numpy(tensor: TensorData) -> NDArray[Any]:
    """Return a read-only array over the bytes of a tensor, valid as long as its record."""
    import numpy

    dtype: Any = numpy_dtype(tensor.dtype)
    if tensor.dtype == "complex32":
        dtype = numpy.dtype([("real", numpy.float16), ("imag", numpy.float16)])
    view = view_of(tensor.data)
    if not view.nbytes:
        return numpy.empty(tensor.shape, dtype)
    return numpy.frombuffer(view, dtype).reshape(tensor.shape)


def array_of(value: Any) -> NDArray[Any] | None:
    """Return a tensor of any framework as a NumPy array, without a copy where possible.

    Of a record it is the record's value: ``array_of(record)``. None for values that are no tensors.

    >>> import numpy
    >>> array_of(numpy.float32(2)), array_of("text")
    (array(2., dtype=float32), None)
    """
    if isinstance(value, Record):
        value = value.value
    if not isinstance(value, TensorData):
        view = adapter_of(type(value)).view
        if view is None:
            return None
        array = view(value)
        if array is not None:
            return array
        value = borrow(value)
    return as_numpy(value) if isinstance(value, TensorData) else None


# -- memory that is known by its address -----------------------------------------------------

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


def memory_at(address: int, nbytes: int) -> memoryview:
    """Return a read-only view of the memory; the caller keeps its owner alive."""
    view: memoryview = _view_memory(address, nbytes, 0x100)
    return view


def payload_at(address: int, nbytes: int, pool: Pool | None) -> Any:
    """Return a copy of contiguous memory as `TensorData.data`; borrow it if there is no pool."""
    if nbytes <= SMALL:
        return read(address, nbytes) if nbytes else b""
    if pool is None:
        return memory_at(address, nbytes)
    lease = pool.acquire(nbytes)
    ctypes.memmove(lease.address, address, nbytes)  # releases the GIL
    return lease
