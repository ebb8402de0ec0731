"""A tensor as a NumPy array over the bytes that are held, without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensortap.arrays.dtypes import numpy_dtype
from tensortap.buffers import view_of
from tensortap.record import TensorData

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
