"""Stacking values of different sizes: of NumPy, and what all frameworks have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tensortap.core.errors import TensortapError

_NUMBERS = (bool, int, float, complex)
_EXACT = 1 << 53  # floats are exact for integers up to this one


def array_of_numbers(values: list[Any]) -> np.ndarray[Any, Any] | None:
    """Return an array that holds these numbers exactly; None for other values.

    >>> array_of_numbers([1, 2.5]), array_of_numbers(["text"])
    (array([1. , 2.5]), None)
    """
    kinds = {type(value) for value in values}
    if not kinds <= set(_NUMBERS):
        return None
    if kinds == {bool}:
        return np.array(values, np.bool_)
    if complex in kinds or float in kinds:
        if all(abs(value) <= _EXACT for value in values if isinstance(value, int)):
            return np.array(values, np.complex128 if complex in kinds else np.float64)
    elif all(-(1 << 63) <= value < 1 << 63 for value in values):
        return np.array(values, np.int64)
    return None


def padded_shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the smallest shape that holds all of these; missing dimensions come first.

    >>> padded_shape([(2, 5), (3, 1), (7,)])
    (3, 7)
    """
    most = max(map(len, shapes))
    whole = [(1,) * (most - len(shape)) + shape for shape in shapes]
    return tuple([max(sizes) for sizes in zip(*whole, strict=True)])


def corner(row: Any, shape: tuple[int, ...]) -> Any:
    """Return the part of a padded tensor that holds a value of this shape.

    >>> corner(np.zeros((3, 7)), (5,)).shape
    (5,)
    """
    return row[(0,) * (row.ndim - len(shape)) + (*map(slice, shape), ...)]


def cannot_fill(name: str, fill: float, dtype: object) -> TensortapError:
    """Return the error for a fill value that a dtype does not have."""
    return TensortapError(f"cannot pad {name} with {fill}: {dtype} has no such value; pass fill=")


def no_common_dtype(name: str, dtypes: Iterable[object]) -> TensortapError:
    """Return the error for dtypes that no dtype holds exactly."""
    names = " and ".join(sorted(str(dtype) for dtype in dtypes))
    return TensortapError(
        f"cannot stack {name}: no dtype holds {names} exactly; convert them in an earlier callback"
    )


def stack(name: str, values: list[Any], fill: float) -> np.ndarray[Any, Any] | None:
    """Return arrays or numbers stacked along a new first dimension, padded with `fill`."""
    if not all(isinstance(value, (np.ndarray, np.generic)) for value in values):
        return array_of_numbers(values)
    arrays = [np.asarray(value) for value in values]
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) > 1:
        raise no_common_dtype(name, dtypes)
    (dtype,) = dtypes
    shape = padded_shape([array.shape for array in arrays])
    if all(array.shape == shape for array in arrays):
        return np.stack(arrays)
    if dtype.kind in "iub" and not float(fill).is_integer():
        raise cannot_fill(name, fill, dtype)
    stacked = np.full((len(arrays), *shape), fill, dtype)
    for row, array in zip(stacked, arrays, strict=True):
        corner(row, array.shape)[...] = array
    return stacked
