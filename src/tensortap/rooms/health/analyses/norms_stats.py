"""Norms of arrays, how far they moved, and in which direction: in double precision, in one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.stats import summarize

_CODES = range(4)  # of the kernel: float32, float64, float16, bfloat16


class Movement(NamedTuple):
    """An array, what it was before the move, and both of the last time, as far as they are known.

    `keep` is a contiguous array of the same size that gets a copy of `new`; it may be
    `previous_new`.
    """

    new: NDArray[Any]
    old: NDArray[Any] | None = None
    previous_new: NDArray[Any] | None = None
    previous_old: NDArray[Any] | None = None
    keep: NDArray[Any] | None = None


class MovementSums(NamedTuple):
    """Sums of squares of an array, of its move, of the previous move, and products of both."""

    squares: float
    moved: float
    moved_before: float
    product: float

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between both moves; None if one of them is zero."""
        size = math.sqrt(self.moved) * math.sqrt(self.moved_before)
        return max(-1.0, min(1.0, self.product / size)) if size > 0 else None


def movements(found: Sequence[Movement]) -> list[MovementSums]:
    """Return the sums over movements; every array is read once, on several threads.

    An array without `old` moved from zero. Those of a movement have one dtype and one shape.

    >>> x, y = np.array([3.0, 4.0], np.float32), np.array([3.0, 0.0], np.float32)
    >>> movements([Movement(x, y)])
    [MovementSums(squares=25.0, moved=16.0, moved_before=0.0, product=0.0)]
    """
    flat = [Movement._make([*map(_flat, each[:4]), each.keep]) for each in found]
    sums: list[MovementSums | None] = [None] * len(flat)
    codes = [summarize.kernel_code(each.new.dtype) for each in flat]
    known = [i for i, code in enumerate(codes) if code in _CODES]
    if known:
        given = [(codes[i], flat[i].new.size, *map(_address, flat[i])) for i in known]
        numbers = np.frombuffer(summarize.kernel.movements(given, summarize.AUTO))
        for i, four in zip(known, numbers.reshape(-1, 4).tolist(), strict=True):
            sums[i] = MovementSums(*four)
    return [
        _by_numpy(each) if total is None else total for each, total in zip(flat, sums, strict=True)
    ]


def squares(arrays: Sequence[NDArray[Any]]) -> list[float]:
    """Return the sum of the squares of each array.

    >>> squares([np.array([3.0, 4.0], np.float32)])
    [25.0]
    """
    return [each.squares for each in movements([Movement(array) for array in arrays])]


def _flat(array: NDArray[Any] | None) -> Any:
    return None if array is None else np.ascontiguousarray(array).reshape(-1)


def _address(array: NDArray[Any] | None) -> int:
    return 0 if array is None else int(array.__array_interface__["data"][0])


def _by_numpy(given: Movement) -> MovementSums:
    """Compute what the kernel does, for dtypes that it does not add up, or without it."""
    new, old, previous_new, previous_old = (
        np.zeros(given.new.size) if array is None else array.astype(np.float64)
        for array in given[:4]
    )
    moved, before = new - old, previous_new - previous_old
    if given.keep is not None:
        given.keep.reshape(-1)[:] = given.new
    pairs = ((new, new), (moved, moved), (before, before), (moved, before))
    return MovementSums(*(float(a @ b) for a, b in pairs))
