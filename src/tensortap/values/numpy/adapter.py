"""NumPy arrays and scalars: captured as bytes in C order, rebuilt as what they were."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from tensortap.core.buffers import Pool, view_of
from tensortap.core.dtypes import itemsize, name_of, numpy_dtype
from tensortap.core.errors import CaptureError, WireError
from tensortap.core.record import Summary, TensorData
from tensortap.stats import summarize_array
from tensortap.values.protocol import SMALL, Adapter, Framework, Path, Snapshot, rejecting


class NumpyFramework(Framework):
    """NumPy, which also stands in for frameworks that cannot be imported."""

    name = "numpy"

    def adapter(self, cls: type) -> Adapter | None:
        if cls is np.ndarray:
            return _ARRAY
        # not np.ma: NumPy imports it then, and a handler that interrupts that fills the stack
        if getattr(sys.modules.get("numpy.ma"), "MaskedArray", None) in cls.__mro__:
            return _MASKED
        if np.ndarray in cls.__mro__:
            return _SUBCLASS
        if np.generic in cls.__mro__ and not issubclass(cls, (str, bytes)):
            return _SCALAR
        return None  # np.str_ and np.bytes_ are captured as str and bytes

    def rebuild(self, tensor: TensorData) -> Any:
        return build(tensor)


FRAMEWORK = NumpyFramework()


def tensor_data(framework: str, value: np.ndarray[Any, Any], pool: Pool | None) -> Snapshot:
    """Copy an array, which a tensor of this framework is; borrow it if there is no pool."""
    dtype = value.dtype
    name = name_of(dtype)
    nbytes = value.nbytes
    data: Any
    if nbytes <= SMALL:
        data = value.tobytes()
    elif pool is None:
        # as bytes: the buffer protocol does not know every dtype
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    else:
        data = pool.acquire(nbytes)
        np.copyto(np.ndarray(value.shape, dtype, data.writable), value)
    return TensorData(framework, name, value.shape, data), nbytes


def _snapshot(value: np.ndarray[Any, Any], pool: Pool | None, path: Path) -> Snapshot:
    return tensor_data("numpy", value, pool)


def _snapshot_scalar(value: np.generic, pool: Pool | None = None, path: Path = ()) -> Snapshot:
    return TensorData("numpy.generic", name_of(value.dtype), (), value.tobytes()), value.nbytes


def _nbytes(value: Any, path: Path) -> int:
    return int(value.nbytes)


def describe(value: Any) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and shape of an array; an empty dtype if it cannot be captured."""
    try:
        return name_of(value.dtype), tuple(value.shape)
    except CaptureError:
        return "", tuple(value.shape)


def _summarize(value: Any) -> Summary:
    try:
        return summarize_array(value)
    except TypeError as error:
        raise CaptureError(str(error)) from None


def _view(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return value.view(np.ndarray)


_ARRAY = Adapter(_snapshot, _nbytes, describe, summarize=_summarize, view=_view)
_SUBCLASS = replace(
    _ARRAY, snapshot=lambda value, pool, path: tensor_data("numpy", _view(value), pool)
)
_SCALAR = Adapter(
    _snapshot_scalar, _nbytes, describe, _snapshot_scalar, _summarize, view=np.asarray
)
_MASKED = replace(
    rejecting(
        "a masked array is two arrays: catch array.filled(...), or array.data and array.mask"
    ),
    view=_view,
)


def payload(tensor: TensorData) -> memoryview:
    """Return the bytes of a tensor; raise WireError unless they fit its dtype and shape."""
    try:
        size = itemsize(tensor.dtype)
    except ValueError as error:
        raise WireError(str(error)) from None
    if len(tensor.shape) > 64 or not all(0 <= length < 1 << 63 for length in tensor.shape):
        raise WireError(f"no tensor has the shape {str(tensor.shape)[:80]}")
    expected = math.prod(tensor.shape) * size
    view = view_of(tensor.data)
    if view.nbytes != expected:
        raise WireError(
            f"a {tensor.dtype} of shape {tensor.shape} takes {expected} bytes, not {view.nbytes}"
        )
    return view


def build(tensor: TensorData) -> Any:
    """Return the tensor as a NumPy array that belongs to the caller."""
    view = payload(tensor)
    if tensor.framework == "numpy.generic":
        if tensor.shape != () or tensor.dtype[1:2] in ("S", "U"):
            raise WireError(f"no scalar: {tensor.dtype} of shape {str(tensor.shape)[:80]}")
        return np.frombuffer(view.tobytes(), numpy_dtype(tensor.dtype))[0]
    try:
        array = np.empty(tensor.shape, numpy_dtype(tensor.dtype))
    except (ValueError, OverflowError) as error:
        raise WireError(f"NumPy has no array of shape {str(tensor.shape)[:80]}: {error}") from None
    if array.nbytes:
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(view, np.uint8)
    return array
