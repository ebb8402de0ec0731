"""Reduce two tensors and their difference to small pictures that keep the extremes."""

from __future__ import annotations

import base64
import itertools
import math
from typing import TYPE_CHECKING, Any

from tensortap.compare.elements import is_number
from tensortap.frameworks.view import array_of
from tensortap.stats.conversion import as_real

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SIDE = 64
_AT_ONCE = 1 << 22  # elements per chunk
_NOT_FINITE = -128


def pictures_of(a: Any, b: Any) -> dict[str, Any] | None:
    """Return what a page draws: cells from -127 to 127 of `scale`, -128 for not finite.

    Each cell is the value of its block that is farthest from zero. None if not a tensor.
    """
    one, other = array_of(a), array_of(b)
    if one is None or other is None or not all(is_number(x.dtype) and x.size for x in (one, other)):
        return None
    found: dict[str, Any] = {}
    small = shrink(one), shrink(other)
    scale = max(_largest(each) for each in small)
    found["a"], found["b"] = (_encoded(each, scale) for each in small)
    found["scale"] = scale
    if one.shape == other.shape:
        difference = shrink(one, other)
        found["scale_d"] = _largest(difference)
        found["d"] = _encoded(difference, found["scale_d"])
    return found


def shrink(a: NDArray[Any], b: NDArray[Any] | None = None) -> NDArray[np.float64]:
    """Reduce a tensor, or ``a - b``, to 64×64 blocks with the value farthest from zero.

    NaN marks blocks with values that are not finite and not the same in both.

    >>> import numpy as np
    >>> shrink(np.array([[1, -5], [2, 3]], np.int8))
    array([[ 1., -5.],
           [ 2.,  3.]])
    """
    import numpy as np

    rows, columns = flattened(a.shape)
    x = a.reshape(rows, columns)
    y = None if b is None else b.reshape(rows, columns)
    down, across = _edges(rows), _edges(columns)
    found = np.empty((len(down) - 1, len(across) - 1))
    for i, (top, bottom) in enumerate(itertools.pairwise(down)):
        if (bottom - top) * columns <= _AT_ONCE:
            found[i] = _extremes(_block(x, y, slice(top, bottom), slice(None)), across[:-1])
            continue
        for j, (left, right) in enumerate(itertools.pairwise(across)):
            found[i, j] = _extremes(_block(x, y, slice(top, bottom), slice(left, right)), [0])[0]
    return found


def flattened(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return two axes for any number of axes, as close to a square as possible.

    >>> flattened((8, 16, 32, 64)), flattened((5,)), flattened(())
    ((128, 2048), (1, 5), (1, 1))
    """
    splits = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    if not splits:
        return 1, math.prod(shape)
    return min(splits, key=lambda each: abs(math.log(each[0] / each[1])))


def _edges(size: int) -> list[int]:
    count = min(SIDE, size)
    return [size * i // count for i in range(count + 1)]


def _block(x: NDArray[Any], y: NDArray[Any] | None, *at: slice) -> NDArray[np.float64]:
    import numpy as np

    one = as_real(x[at])
    if y is None:
        return one
    other = as_real(y[at])
    with np.errstate(invalid="ignore", over="ignore"):
        difference: NDArray[np.float64] = one - other
    alike = (one == other) | (np.isnan(one) & np.isnan(other))
    difference[alike] = 0.0
    return difference


def _extremes(block: NDArray[np.float64], starts: list[int]) -> NDArray[np.float64]:
    import numpy as np

    high = np.fmax.reduceat(block, starts, axis=1).max(axis=0)
    low = np.fmin.reduceat(block, starts, axis=1).min(axis=0)
    whole = np.logical_and.reduceat(np.isfinite(block), starts, axis=1).all(axis=0)
    return np.where(whole, np.where(-low > high, low, high), np.nan)


def _largest(cells: NDArray[np.float64]) -> float:
    import numpy as np

    finite = cells[np.isfinite(cells)]
    return float(np.abs(finite).max()) if finite.size else 0.0


def _encoded(cells: NDArray[np.float64], scale: float) -> dict[str, Any]:
    import numpy as np

    finite = np.isfinite(cells)
    share = np.where(finite, cells, 0.0) / (scale or 1.0)
    codes = np.rint(share * 127).astype(np.int8)
    # draw no nonzero value as zero, however small
    small = finite & (codes == 0) & (share != 0)
    codes[small] = np.sign(share[small]).astype(np.int8)
    codes[~finite] = _NOT_FINITE
    text = base64.b64encode(codes.tobytes()).decode()
    return {"rows": cells.shape[0], "columns": cells.shape[1], "cells": text}
