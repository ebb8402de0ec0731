"""Fewer points that look the same: of every pixel the first, the last, the least and the most."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Reals = NDArray[np.float64]
    Whole = NDArray[np.int64]


def decimate(x: NDArray[np.generic], y: Reals, width: int) -> Whole:
    """Which points to draw of a line with rising `x`, at most five a pixel.

    What is drawn is the same: in each pixel the least and the greatest value are kept, and so is
    a NaN, since it is a gap in the line.

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
    place = x.astype(np.float64)
    span = float(place[-1] - place[0]) or 1.0
    pixel = np.minimum(((place - place[0]) * (width / span)).astype(np.int64), width - 1)
    new = np.diff(pixel, prepend=-1) != 0
    starts = np.flatnonzero(new)
    number = np.cumsum(new) - 1
    least, most = np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts)
    kept = [_first(y == extreme[number], number) for extreme in (least, most)]
    kept += [starts, np.append(starts[1:], count) - 1, _first(np.isnan(y), number)]
    return np.unique(np.concatenate(kept))


def _first(chosen: NDArray[np.bool_], number: Whole) -> Whole:
    """The first chosen point of each pixel."""
    found = np.flatnonzero(chosen)
    return found[np.unique(number[found], return_index=True)[1]]
