"""Tensors as NumPy arrays over the same memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensortap.buffers import view_of
from tensortap.dtypes import numpy_dtype
from tensortap.frameworks.adapters import adapter_of
from tensortap.frameworks.snapshot import borrow
from tensortap.record import Record, TensorData

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

    Of a record it is the record's value: ``tap.array_of(record)``. None for values that are no
    tensors.

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
