"""A large matrix as few tiles: the least, the greatest and what is not finite are kept."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.stats.values import real

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Reals = NDArray[np.float64]

NAN, POSINF, NEGINF = 1, 2, 4
_AT_ONCE = 1 << 22  # elements that are looked at in one go


class Tiles(NamedTuple):
    """Of each tile the least and the greatest finite value, and which others it holds."""

    low: Reals
    high: Reals
    flags: NDArray[np.uint8]
    height: int  # rows of the matrix that a tile stands for
    width: int

    @property
    def far(self) -> Reals:
        """The value farthest from zero; NaN where none is finite."""
        return np.where(-self.low > self.high, self.low, self.high)


def tiles(matrix: NDArray[Any], rows: int, columns: int) -> Tiles:
    """At most so many rows and columns of tiles.

    >>> import numpy as np
    >>> whole = np.zeros((4, 4), "float32")
    >>> whole[1, 2] = np.nan
    >>> whole[3, 0] = -5
    >>> found = tiles(whole, 2, 2)
    >>> found.low.tolist(), found.flags.tolist()
    ([[0.0, 0.0], [-5.0, 0.0]], [[0, 1], [0, 0]])
    """
    height = max(1, math.ceil(matrix.shape[0] / rows))
    width = max(1, math.ceil(matrix.shape[1] / columns))
    down, across = math.ceil(matrix.shape[0] / height), math.ceil(matrix.shape[1] / width)
    low, high = np.empty((down, across)), np.empty((down, across))
    flags = np.zeros((down, across), np.uint8)
    starts = np.arange(0, matrix.shape[1], width)
    together = max(1, _AT_ONCE // max(1, height * matrix.shape[1]))
    for first in range(0, down, together):
        last = min(down, first + together)
        block = real(matrix[first * height : last * height])
        edges = np.arange(0, len(block), height)
        if not np.isfinite(block).all():
            for flag, found in (
                (NAN, np.isnan(block)),
                (POSINF, block == np.inf),
                (NEGINF, block == -np.inf),
            ):
                held = np.logical_or.reduceat(np.logical_or.reduceat(found, edges), starts, axis=1)
                flags[first:last] |= np.uint8(flag) * held.astype(np.uint8)
            block = np.where(np.isfinite(block), block, np.nan)
        low[first:last] = np.fmin.reduceat(np.fmin.reduceat(block, edges), starts, axis=1)
        high[first:last] = np.fmax.reduceat(np.fmax.reduceat(block, edges), starts, axis=1)
    return Tiles(low, high, flags, height, width)


def beacons(mask: NDArray[np.bool_], side: int = 48) -> tuple[Any, Any]:
    """Rows and columns of marked cells, one wherever there are only a few.

    A cell may be less than a pixel, and then a browser draws nothing: these are to be drawn as
    marks of a size of their own. Where many lie together they are seen without.

    >>> import numpy as np
    >>> mask = np.zeros((1000, 1000), bool)
    >>> mask[7, 900] = mask[500:600, :100] = True
    >>> rows, columns = beacons(mask)
    >>> list(zip(rows.tolist(), columns.tolist()))[0], len(rows) < 20
    ((7, 900), True)
    """
    rows, columns = np.nonzero(mask)
    block = (rows * side // len(mask)) * side + columns * side // mask.shape[1]
    _, first, count = np.unique(block, return_index=True, return_counts=True)
    lonely = first[count < 0.3 * mask.size / side**2 + 1]
    return rows[lonely], columns[lonely]
