"""NumPy arrays and scalars: taken as bytes in C order, given back as what they were."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tensortap.buffers import Pool, view_of
from tensortap.dtypes import itemsize, name_of, numpy_dtype
from tensortap.errors import CaptureError, WireError
from tensortap.frameworks.protocol import SMALL, Adapter, Path, Taken, refusing
from tensortap.record import Summary, TensorData
from tensortap.stats import summarize_array

_EMPTY = {"U": "<U1", "S": "|S1"}


def _take_array(value: np.ndarray[Any, Any], pool: Pool | None, path: Path) -> Taken:
    dtype = value.dtype
    name = name_of(dtype)
    nbytes = value.nbytes
    data: Any
    if nbytes <= SMALL:
        data = value.tobytes()
    elif pool is None:
        # bytes, since the buffer protocol doesn't know every dtype
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    else:
        data = pool.acquire(nbytes)
        np.copyto(np.ndarray(value.shape, dtype, data.writable), value)
    return TensorData("numpy", name, value.shape, data), nbytes


def _take_subclass(value: np.ndarray[Any, Any], pool: Pool | None, path: Path) -> Taken:
    return _take_array(value.view(np.ndarray), pool, path)


def _take_scalar(value: np.generic, pool: Pool | None, path: Path) -> Taken:
    dtype = value.dtype
    if not dtype.itemsize and dtype.kind in _EMPTY:
        # a dtype has to have a width: the empty string is none of width one
        return TensorData("numpy.generic", _EMPTY[dtype.kind], (0,), b""), 0
    return TensorData("numpy.generic", name_of(dtype), (), value.tobytes()), dtype.itemsize


def _nbytes(value: Any, path: Path) -> int:
    return int(value.nbytes)


def describe(value: Any) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape of an array; no dtype where it can't be caught."""
    try:
        return name_of(value.dtype), tuple(value.shape)
    except CaptureError:
        return "", tuple(value.shape)


def _summarize(value: np.ndarray[Any, Any]) -> Summary:
    try:
        return summarize_array(value)
    except TypeError as error:
        raise CaptureError(str(error)) from None


_ARRAY = Adapter(_take_array, _nbytes, describe, summarize=_summarize)
_SUBCLASS = Adapter(_take_subclass, _nbytes, describe, summarize=_summarize)
_SCALAR = Adapter(_take_scalar, _nbytes, describe, lambda value: _take_scalar(value, None, ()))
_MASKED = refusing(
    "a masked array is two arrays: catch array.filled(...), or array.data and array.mask"
)


def adapter(cls: type) -> Adapter | None:
    """The adapter for a class of NumPy's, or a subclass of one."""
    if cls is np.ndarray:
        return _ARRAY
    if np.ma.MaskedArray in cls.__mro__:
        return _MASKED
    if np.ndarray in cls.__mro__:
        return _SUBCLASS
    if np.generic in cls.__mro__:
        return _SCALAR
    return None


def payload(node: TensorData) -> memoryview:
    """The bytes of a tensor, checked against its dtype and shape."""
    try:
        size = itemsize(node.dtype)
    except ValueError as error:
        raise WireError(str(error)) from None
    if len(node.shape) > 64 or not all(0 <= length < 1 << 63 for length in node.shape):
        raise WireError(f"no tensor has the shape {str(node.shape)[:80]}")
    expected = math.prod(node.shape) * size
    view = view_of(node.data)
    if view.nbytes != expected:
        raise WireError(
            f"{view.nbytes} bytes are not a {node.dtype} of shape {node.shape}, which takes "
            f"{expected}"
        )
    return view


def build(node: TensorData) -> Any:
    """The tensor as a NumPy array that belongs to the caller."""
    view = payload(node)
    if node.framework == "numpy.generic":
        return _build_scalar(node, view)
    try:
        array = np.empty(node.shape, numpy_dtype(node.dtype))
    except (ValueError, OverflowError) as error:
        raise WireError(f"NumPy has no array of shape {str(node.shape)[:80]}: {error}") from None
    if array.nbytes:
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(view, np.uint8)
    return array


def _build_scalar(node: TensorData, view: memoryview) -> Any:
    name = node.dtype
    if node.shape != () and (node.shape != (0,) or name not in _EMPTY.values()):
        raise WireError(f"a scalar has no shape, not {str(node.shape)[:80]}")
    # strings are made of all their bytes: an element of an array would lose the zeros at its end
    if name.startswith("|S"):
        return np.bytes_(view.tobytes())
    if name[1] == "U":
        try:
            order = "utf-32-le" if name[0] == "<" else "utf-32-be"
            return np.str_(view.tobytes().decode(order, "surrogatepass"))
        except UnicodeDecodeError as error:
            raise WireError(f"not a string of NumPy's: {error}") from None
    return np.frombuffer(view.tobytes(), numpy_dtype(name))[0]
