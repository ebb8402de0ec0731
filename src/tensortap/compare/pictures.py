"""Reduce two tensors and their difference to small pictures that keep the extremes."""

from __future__ import annotations

import base64
import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.frameworks.view import array_of
from tensortap.stats.conversion import as_real, is_number
from tensortap.viz import reals

SIDE = 64
_AT_ONCE = 1 << 22  # elements that are converted at once
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

    Blocks with values that are not finite, and not the same in both, are not finite.

    >>> import numpy as np
    >>> shrink(np.array([[1, -5], [2, 3]], np.int8))
    array([[ 1., -5.],
           [ 2.,  3.]])
    """
    sides = [each.reshape(flattened(each.shape)) for each in (a, b) if each is not None]
    columns = sides[0].shape[1]
    if a.size <= _AT_ONCE:
        cells = reals.shrink(_real(*sides), SIDE, SIDE, 0.0)
    else:
        edges = [columns * i // min(SIDE, columns) for i in range(min(SIDE, columns) + 1)]
        strips = ([side[:, i:j] for side in sides] for i, j in itertools.pairwise(edges))
        cells = np.hstack([reals.shrink(_real(*strip), SIDE, 1, 0.0) for strip in strips])
    return cells


def _real(one: NDArray[Any], other: NDArray[Any] | None = None) -> NDArray[np.float64]:
    """Return a matrix as real numbers, or the difference of two: 0 where they are the same."""
    x = as_real(one)
    if other is None:
        return x
    y = as_real(other)
    with np.errstate(invalid="ignore", over="ignore"):
        difference: NDArray[np.float64] = x - y
    difference[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
    return difference


def flattened(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return two axes for any number of axes, as close to a square as possible.

    >>> flattened((8, 16, 32, 64)), flattened((5,)), flattened(())
    ((128, 2048), (1, 5), (1, 1))
    """
    splits = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    if not splits:
        return 1, math.prod(shape)
    return min(splits, key=lambda each: abs(math.log(each[0] / each[1])))


def _largest(cells: NDArray[np.float64]) -> float:
    finite = cells[np.isfinite(cells)]
    return float(np.abs(finite).max()) if finite.size else 0.0


def _encoded(cells: NDArray[np.float64], scale: float) -> dict[str, Any]:
    finite = np.isfinite(cells)
    share = np.where(finite, cells, 0.0) / (scale or 1.0)
    codes = np.rint(share * 127).astype(np.int8)
    # draw no nonzero value as zero, however small
    small = finite & (codes == 0) & (share != 0)
    codes[small] = np.sign(share[small]).astype(np.int8)
    codes[~finite] = _NOT_FINITE
    text = base64.b64encode(codes.tobytes()).decode()
    return {"rows": cells.shape[0], "columns": cells.shape[1], "cells": text}
