"""Tensors as real numbers to draw: converted, sliced, shrunk, counted, scaled, subtracted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.stats.conversion import as_real, complex_part

Range = tuple[float, float]


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


def edges(size: int, parts: int) -> NDArray[np.int64]:
    """Return where parts of an axis begin and the last one ends.

    >>> edges(10, 4).tolist()
    [0, 2, 5, 7, 10]
    """
    return size * np.arange(parts + 1) // parts


def shrink(
    matrix: NDArray[Any],
    rows: int,
    columns: int,
    middle: float,
) -> NDArray[Any]:
    """Reduce a matrix to at most so many blocks, each with its value farthest from `middle`.

    NaN wins over everything, and infinities over finite values.

    >>> shrink(np.array([[1, -5, 0, np.nan], [2, 3, 1, 2]]), 1, 2, 0.0)
    array([[-5., nan]])
    """
    height, width = matrix.shape
    rows, columns = min(rows, height), min(columns, width)

    def real(part: slice) -> NDArray[Any]:
        return reals(matrix[part])

    if (rows, columns) == (height, width):
        return real(slice(None))
    down, across = edges(height, rows), edges(width, columns)[:-1]
    kind = real(slice(1)).dtype
    high, low = np.empty((rows, columns), kind), np.empty((rows, columns), kind)
    with np.errstate(invalid="ignore"):
        for row in range(rows):
            # one band at a time stays in the cache
            band = real(slice(down[row], down[row + 1]))
            np.maximum.reduceat(np.maximum.reduce(band, axis=0), across, out=high[row])
            np.minimum.reduceat(np.minimum.reduce(band, axis=0), across, out=low[row])
        return np.where(middle - low > high - middle, low, high)


def nonempty(low: float, high: float) -> Range:
    """Widen a range whose ends are equal.

    >>> nonempty(0.0, 0.0), nonempty(2.0, 2.0)
    ((-1.0, 1.0), (1.0, 3.0))
    """
    if high - low > 4e-16 * max(abs(low), abs(high)) and high - low > 1e-300:
        return low, high
    half = abs(low) / 2 or 1.0
    return (low - half, high + half) if half > 1e-300 else (low - 1.0, high + 1.0)


def shares_of(values: NDArray[Any], limits: Range) -> NDArray[Any]:
    """Return how far through a range values are, from 0 to 1, as a new array."""
    low, high = limits
    largest, width = max(abs(low), abs(high)), high - low
    if values.dtype == np.float32 and not (largest < 1e38 and width > max(largest * 1e-4, 1e-36)):
        values = values.astype(np.float64)
    if largest > 1e300:  # differences may exceed float64
        values, low, high = values / 4, low / 4, high / 4
    with np.errstate(over="ignore", invalid="ignore"):
        share = values - low
        share *= 1 / (high - low) if high - low > 1e-300 else 0.0
    return np.clip(share, 0, 1, out=share)


def counts_of(array: NDArray[Any], limits: Range, bins: int) -> NDArray[np.int64]:
    """Count the finite values in each of `bins` equal parts of a range.

    >>> counts_of(np.array([0.0, 0.1, 0.9, 1.0, np.nan, 7.0]), (0.0, 1.0), 2).tolist()
    [2, 2]
    """
    low, high = limits
    counts = np.zeros(bins, np.int64)
    flat = array.reshape(-1)
    with np.errstate(all="ignore"):
        for start in range(0, flat.size, 1 << 20):  # a bounded amount of memory
            values = reals(flat[start : start + (1 << 20)])
            values = values[(values >= low) & (values <= high)]
            where = (shares_of(values, limits) * bins).astype(np.int64)
            counts += np.bincount(np.minimum(where, bins - 1), minlength=bins)
    return counts
