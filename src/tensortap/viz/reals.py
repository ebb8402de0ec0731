"""Tensors as real numbers to draw: converted, sliced, and shrunk without losing extremes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.stats.conversion import as_real, check_numeric, complex_part

if TYPE_CHECKING:
    from numpy.typing import NDArray


def is_number(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype holds numbers."""
    try:
        check_numeric(dtype)
    except TypeError:
        return False
    return True


def reals(array: NDArray[Any]) -> NDArray[Any]:
    """Return values as float32 or float64, whichever holds them; complex ones as magnitudes.

    >>> reals(np.array([3 + 4j])), reals(np.array([True])).dtype
    (array([5.]), dtype('float32'))
    """
    dtype = array.dtype
    if dtype in (np.float32, np.float64):
        return array
    with np.errstate(all="ignore"):
        # float32 holds every dtype of two bytes exactly
        narrow = dtype.itemsize <= 2 and complex_part(dtype) is None
        return array.astype(np.float32) if narrow else as_real(array)


def matrix_at(array: NDArray[Any], index: Sequence[int] | None = None) -> tuple[NDArray[Any], str]:
    """Return the last two axes at an index of the others (default 0), and how to write that.

    >>> matrix_at(np.zeros((2, 3, 4, 5)), (1, 2))[1], matrix_at(np.zeros(3))[1]
    ('[1, 2, :, :]', '')
    """
    leading = array.shape[:-2]
    at = (0,) * len(leading) if index is None else tuple(index)
    if len(at) != len(leading):
        raise ValueError(
            f"index must have {len(leading)} numbers for the shape {list(array.shape)}, "
            f"one per axis but the last two; got {len(at)}"
        )
    if not at:
        return array, ""
    try:
        return array[at], f"[{', '.join(map(str, at))}, :, :]"
    except IndexError:
        if not array.size:
            return array, ""
        raise ValueError(f"no {list(at)} in a tensor of shape {list(array.shape)}") from None


def shrink(matrix: NDArray[Any], rows: int, columns: int, middle: float) -> NDArray[Any]:
    """Reduce a matrix to at most so many blocks, each with its value farthest from `middle`.

    NaN wins over everything, and infinities over finite values.

    >>> shrink(np.array([[1, -5, 0, np.nan], [2, 3, 1, 2]]), 1, 2, 0.0)
    array([[-5., nan]])
    """
    height, width = matrix.shape
    rows, columns = min(rows, height), min(columns, width)
    if (rows, columns) == (height, width):
        return reals(matrix)
    down = [height * i // rows for i in range(rows + 1)]
    across = np.array([width * i // columns for i in range(columns)])
    kind = reals(matrix[:1]).dtype
    high, low = np.empty((rows, columns), kind), np.empty((rows, columns), kind)
    with np.errstate(invalid="ignore"):
        for row in range(rows):
            # one band at a time stays in the cache
            band = reals(matrix[down[row] : down[row + 1]])
            np.maximum.reduceat(np.maximum.reduce(band, axis=0), across, out=high[row])
            np.minimum.reduceat(np.minimum.reduce(band, axis=0), across, out=low[row])
        return np.where(middle - low > high - middle, low, high)
