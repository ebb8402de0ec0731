"""A large matrix as tiles that keep the smallest, the largest and every non-finite value."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.stats.conversion import as_real
from tensortap.viz.figures.encoding import Floats

NAN, POSINF, NEGINF = 1, 2, 4
_CHUNK = 1 << 22  # elements that are reduced at once
_BLOCKS = 48  # blocks along a side in which cells are counted


class Tiles(NamedTuple):
    """The smallest and largest finite value of each tile, and flags for NaN and infinities."""

    low: Floats
    high: Floats
    flags: NDArray[np.uint8]
    height: int  # rows of the matrix in a tile
    width: int

    @property
    def far(self) -> Floats:
        """Return the values farthest from zero; NaN where none is finite."""
        return np.where(-self.low > self.high, self.low, self.high)


def tiles(matrix: NDArray[Any], rows: int, columns: int) -> Tiles:
    """Reduce a matrix to at most so many rows and columns of tiles.

    >>> import numpy as np
    >>> whole = np.zeros((4, 4), "float32")
    >>> whole[1, 2] = np.nan
    >>> whole[3, 0] = -5
    >>> reduced = tiles(whole, 2, 2)
    >>> reduced.low.tolist(), reduced.flags.tolist()
    ([[0.0, 0.0], [-5.0, 0.0]], [[0, 1], [0, 0]])
    """
    height, width = math.ceil(matrix.shape[0] / rows), math.ceil(matrix.shape[1] / columns)
    down, across = math.ceil(matrix.shape[0] / height), math.ceil(matrix.shape[1] / width)
    low, high = np.empty((down, across)), np.empty((down, across))
    flags = np.zeros((down, across), np.uint8)
    starts = np.arange(0, matrix.shape[1], width)

    def reduced(ufunc: np.ufunc, values: NDArray[Any]) -> NDArray[Any]:
        by_row = ufunc.reduceat(values, np.arange(0, len(values), height))
        return np.asarray(ufunc.reduceat(by_row, starts, axis=1))

    together = max(1, _CHUNK // (height * matrix.shape[1]))
    for first in range(0, down, together):
        part = slice(first, first + together)
        block = as_real(matrix[first * height : (first + together) * height])
        finite = np.isfinite(block)
        if not finite.all():
            masks = (NAN, np.isnan(block)), (POSINF, block == np.inf), (NEGINF, block == -np.inf)
            for flag, mask in masks:
                flags[part] |= np.uint8(flag) * reduced(np.logical_or, mask)
            block = np.where(finite, block, np.nan)
        low[part], high[part] = reduced(np.fmin, block), reduced(np.fmax, block)
    return Tiles(low, high, flags, height, width)


def lonely_cells(mask: NDArray[np.bool_]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return rows and columns of marked cells, one per neighborhood with few of them.

    A browser may not draw a cell that is smaller than a pixel; many cells together are visible.

    >>> import numpy as np
    >>> mask = np.zeros((1000, 1000), bool)
    >>> mask[7, 900] = mask[500:600, :100] = True
    >>> rows, columns = lonely_cells(mask)
    >>> list(zip(rows.tolist(), columns.tolist()))[0], len(rows) < 20
    ((7, 900), True)
    """
    rows, columns = np.nonzero(mask)
    block = (rows * _BLOCKS // len(mask)) * _BLOCKS + columns * _BLOCKS // mask.shape[1]
    _, first, count = np.unique(block, return_index=True, return_counts=True)
    lonely = first[count < 0.3 * mask.size / _BLOCKS**2 + 1]
    return rows[lonely], columns[lonely]
