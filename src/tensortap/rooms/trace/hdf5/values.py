"""Values as HDF5 stores them.

HDF5 has integers, float16 to float64 and complex numbers. Any other dtype is stored as
unsigned integers of its size, bit for bit, with its name in the attribute ``tensortap_dtype``:
bfloat16 as uint16, float8 as uint8, times as int64.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.core.dtypes import DTYPES, itemsize, numpy_dtype
from tensortap.core.errors import TensortapError
from tensortap.core.record import Number, TensorData, Value
from tensortap.values.snapshot import borrow
from tensortap.values.view import as_numpy

Array = NDArray[Any]
_NATIVE = frozenset(row.name for row in DTYPES.values() if row.numpy == row.name)
_SWAPPED = re.compile(r">[iufc]\d+")
_INTEGERS = frozenset(name for name in _NATIVE if DTYPES[name].kind in ("int", "uint"))
_PYTHON: dict[type, str] = {bool: "bool", int: "int64", float: "float64"}


class StoredValue(NamedTuple):
    """A value as it is stored: an array of a dtype that HDF5 has."""

    dtype: str
    content: Array


def stored_value(
    value: Any, float_dtype: str | None = None, int_dtype: str | None = None
) -> StoredValue:
    """Return a value as it will be stored, without copying its memory if possible."""
    name, array = _array(borrow(value), value)
    wanted = int_dtype if name in _INTEGERS else float_dtype if _is_float(name) else None
    if wanted is not None and wanted != name:
        array = _converted(array, name, wanted)
        name = wanted
    return StoredValue(name, array.view(stored_dtype(name)))


def _array(node: Value, value: Any) -> tuple[str, Array]:
    if isinstance(node, TensorData):
        return node.dtype, as_numpy(node)
    if isinstance(node, Number) and node.kind == "complex":
        return "complex128", np.array(complex(*node.parts), np.complex128)
    name = _PYTHON.get(type(node))
    if name is not None:
        return name, np.array(node, name)
    if isinstance(node, Number):
        raise TensortapError("HDF5 cannot store an integer of more than 64 bits")
    raise TensortapError(
        f"HDF5 stores tensors and numbers, not a {type(value).__name__}: trace its parts, or "
        "convert it in an earlier callback"
    )


@functools.lru_cache(maxsize=256)
def _is_float(name: str) -> bool:
    # packed dtypes, and those that this ml_dtypes does not have, are only bits for NumPy
    row = DTYPES.get(name)
    return row is not None and row.kind == "float" and numpy_dtype(name).name == name


def check_dtype(given: Any, option: str) -> str:
    """Return the name of a dtype of NumPy or torch; raise if it does not fit the option."""
    name = str(getattr(given, "__name__", given)).removeprefix("torch.")
    if not (_is_float(name) if option == "float_dtype" else name in _INTEGERS):
        example = "'float16', 'float32' or 'bfloat16'" if option == "float_dtype" else "'int32'"
        raise TensortapError(f"{option} must be the name of a dtype, like {example}, got {given!r}")
    return name


def _converted(array: Array, name: str, wanted: str) -> Array:
    target = numpy_dtype(wanted)
    if name in _INTEGERS and array.size:
        limits, low, high = np.iinfo(target), int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            raise TensortapError(f"int_dtype={wanted!r} cannot hold values from {low} to {high}")
    with np.errstate(all="ignore"):  # the user chose the dtype: too large values become infinite
        return array.astype(target)


def stored_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype in the file for a dtype of tensors.

    >>> stored_dtype("float32"), stored_dtype("bfloat16"), stored_dtype("float8_e4m3fn")
    (dtype('float32'), dtype('uint16'), dtype('uint8'))
    """
    if name in _NATIVE or _SWAPPED.fullmatch(name):
        return np.dtype(name)
    size = itemsize(name)
    if size == 8:  # times
        return np.dtype(np.int64)
    return np.dtype(f"u{size}" if size in (1, 2, 4) else f"V{size}")


def integers(item: Any) -> Array:
    """Return an iteration or a rank, or nested lists of them, as an array padded with -1."""
    if not isinstance(item, (list, tuple)):
        return np.array(item, np.int64)
    parts = [integers(part) for part in item]
    if len({part.ndim for part in parts}) > 1:
        raise TensortapError("iterations and ranks must be nested equally deep in their lists")
    shape = np.max([part.shape for part in parts], axis=0) if parts else ()
    array = np.full((len(parts), *shape), -1, np.int64)
    for i, part in enumerate(parts):
        corner: Any = (i, *map(slice, part.shape))
        array[corner] = part
    return array
