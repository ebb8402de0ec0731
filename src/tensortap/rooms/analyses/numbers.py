"""Numbers about arrays, in double precision: norms, movements, entropies of logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.stats import summarize

Reals = NDArray[np.float64]

_CODES = range(4)  # of the kernel: float32, float64, float16, bfloat16


class Movement(NamedTuple):
    """An array, what it was before, and a contiguous array of its size that gets a copy of it."""

    new: NDArray[Any]
    old: NDArray[Any] | None = None
    keep: NDArray[Any] | None = None


class MovementSums(NamedTuple):
    """Sums of squares of an array, and of its move."""

    squares: float
    moved: float


def movements(found: Sequence[Movement]) -> list[MovementSums]:
    """Return the sums over movements; every array is read once, on several threads.

    An array without `old` moved from zero. Those of a movement have one dtype and one shape.
    """
    flat = [Movement(_flat(each.new), _flat(each.old), each.keep) for each in found]
    sums: list[MovementSums | None] = [None] * len(flat)
    codes = [summarize.kernel_code(each.new.dtype) for each in flat]
    known = [i for i, code in enumerate(codes) if code in _CODES]
    if known:
        given = [
            (codes[i], new.size, _address(new), _address(old), 0, 0, _address(keep))
            for i, (new, old, keep) in ((i, flat[i]) for i in known)
        ]
        numbers = np.frombuffer(summarize.kernel.movements(given, summarize.AUTO))
        for i, four in zip(known, numbers.reshape(-1, 4).tolist(), strict=True):
            sums[i] = MovementSums(*four[:2])
    return [
        _by_numpy(each) if total is None else total for each, total in zip(flat, sums, strict=True)
    ]


def squares(arrays: Sequence[NDArray[Any]]) -> list[float]:
    return [each.squares for each in movements([Movement(array) for array in arrays])]


def _flat(array: NDArray[Any] | None) -> Any:
    return None if array is None else np.ascontiguousarray(array).reshape(-1)


def _address(array: NDArray[Any] | None) -> int:
    return 0 if array is None else int(array.__array_interface__["data"][0])


def _by_numpy(given: Movement) -> MovementSums:
    """Compute what the kernel does, for dtypes that it does not add up, or without it."""
    new = given.new.astype(np.float64)
    moved = new if given.old is None else new - given.old.astype(np.float64)
    if given.keep is not None:
        given.keep.reshape(-1)[:] = given.new
    return MovementSums(float(new @ new), float(moved @ moved))


class HeadStatistics(NamedTuple):
    """Per head: the largest logit, and the mean entropy of the attention in nats."""

    max_logit: Reals
    entropy: Reals


def head_statistics(logits: Reals) -> HeadStatistics:
    """Return the largest logit and the entropy of each head, of queries that see a key."""
    largest = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    with np.errstate(all="ignore"):
        below = logits - largest
        weights = np.exp(below)
        total = weights.sum(axis=-1)
        products = np.where(weights == 0, 0.0, weights * below)
        entropy = np.log(total) - products.sum(axis=-1) / total
    blind = np.isneginf(largest[..., 0])
    heads = np.where(blind, 0.0, entropy).sum(axis=(0, 2)), (~blind).sum(axis=(0, 2))
    with np.errstate(all="ignore"):
        return HeadStatistics(largest.max(axis=(0, 2, 3), initial=-np.inf), heads[0] / heads[1])


def evenly_spaced(count: int, most: int) -> NDArray[np.int64]:
    """Return at most so many of `count` indices, the first and the last one among them.

    >>> evenly_spaced(9, 3).tolist(), evenly_spaced(2, 3).tolist()
    ([0, 4, 8], [0, 1])
    """
    if count <= most:
        return np.arange(count)
    spaced: NDArray[np.int64] = (np.arange(most) * (count - 1)) // (most - 1)
    return spaced
