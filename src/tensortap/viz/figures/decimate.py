"""Fewer points that draw the same line."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tensortap.viz.figures.encoding import Floats, Integers


def decimate(x: NDArray[np.generic], y: Floats, width: int) -> Integers:
    """Return which points of a line with rising `x` to draw, at most five per pixel.

    Each pixel keeps its first, last, smallest and largest value, and one NaN: a gap in the line.

    >>> import numpy as np
    >>> y = np.zeros(100_000)
    >>> y[31_415] = 7.0
    >>> y[27_182] = np.nan
    >>> kept = decimate(np.arange(100_000), y, 500)
    >>> 31_415 in kept, 27_182 in kept, len(kept) < 2500
    (True, True, True)
    """
    count = len(x)
    if count <= 5 * width:
        return np.arange(count)
    distance = x.astype(np.float64) - float(x[0])
    span = float(distance[-1]) or 1.0
    pixel = np.minimum((distance * (width / span)).astype(np.int64), width - 1)
    new = np.diff(pixel, prepend=-1) != 0
    starts = np.flatnonzero(new)
    number = np.cumsum(new) - 1
    low, high = np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts)
    kept = [_first(mask, number) for mask in (y == low[number], y == high[number], np.isnan(y))]
    return np.unique(np.concatenate([*kept, starts, np.append(starts[1:], count) - 1]))


def _first(chosen: NDArray[np.bool_], number: Integers) -> Integers:
    """Return the first chosen point of each pixel."""
    found = np.flatnonzero(chosen)
    return found[np.unique(number[found], return_index=True)[1]]
