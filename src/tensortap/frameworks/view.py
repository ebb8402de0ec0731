"""A tensor as a NumPy array over the bytes that are held, without a copy."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tensortap.buffers import view_of
from tensortap.dtypes import numpy_dtype
from tensortap.record import Record, TensorData

if TYPE_CHECKING:
    from numpy.typing import NDArray


def as_numpy(tensor: TensorData) -> NDArray[Any]:
    """The array, for reading; it is good as long as the record that holds the tensor."""
    import numpy

    dtype: Any = numpy_dtype(tensor.dtype)
    if tensor.dtype == "complex32":
        dtype = numpy.dtype([("real", numpy.float16), ("imag", numpy.float16)])
    view = view_of(tensor.data)
    if not view.nbytes:
        return numpy.empty(tensor.shape, dtype)
    return numpy.frombuffer(view, dtype).reshape(tensor.shape)


def array_of(value: Any) -> NDArray[Any] | None:
    """A tensor of any framework as a NumPy array, without a copy where that can be; None of others.

    Of a record it is its value: ``tap.array_of(record)``.

    >>> import numpy
    >>> array_of(numpy.float32(2)), array_of("text")
    (array(2., dtype=float32), None)
    """
    import numpy

    from tensortap.frameworks.snapshot import borrow

    if isinstance(value, Record):
        value = value.value
    if isinstance(value, numpy.ndarray):
        return value.view(numpy.ndarray)
    if isinstance(value, TensorData):
        return as_numpy(value)
    if isinstance(value, numpy.generic):
        return numpy.asarray(value)
    if not hasattr(value, "dtype") or not hasattr(value, "shape") or isinstance(value, type):
        return None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        from tensortap.frameworks.torch.adapter import in_place

        found: NDArray[Any] | None = in_place(value)
        if found is not None:
            return found
    tensor = borrow(value)
    return as_numpy(tensor) if isinstance(tensor, TensorData) else None
