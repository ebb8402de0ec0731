"""Find the one element in which two tensors differ, from nothing but their digests.

The difference of two digests consists of four sums over the pieces of 16 bits that differ. If only
the two pieces of one word do, two of the sums are equations for them, and the others confirm the
solution; another word passes with a probability of about 2**-94. See kernel/digest.c.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.record import Shard
from tensortap.stats.shard_digest import BLOCK, block_matrices, key_table, seed_of

_MOST_BLOCKS = 1 << 15  # that are searched, in a few seconds
_HALF = 1 << 16


class ChangedElement(NamedTuple):
    """An element of a tensor; `bit` is the one that differs, None if several do."""

    at: tuple[int, ...]
    bit: int | None


def changed_element(
    one: bytes, other: bytes, dtype: str, itemsize: int, shape: tuple[int, ...],
    shard: Shard | None = None,
) -> ChangedElement | None:  # fmt: skip
    """Return the only element that differs; None if there are several, or too many to search.

    `one` and `other` are the sums of the digests, `shape` is that of the array.

    >>> import numpy as np
    >>> from tensortap.stats.shard_digest import shard_digest, sums_of
    >>> a = np.zeros((3, 4), np.float32)
    >>> b = a.copy()
    >>> b[1, 2] = 2.0  # bit 30 and no other
    >>> changed_element(sums_of(shard_digest(a)), sums_of(shard_digest(b)), "float32", 4, a.shape)
    ChangedElement(at=(1, 2), bit=30)
    """
    whole = shard.global_shape if shard is not None else shape
    blocks = _blocks(shape, shard, whole, itemsize)
    if len(blocks) > _MOST_BLOCKS or itemsize not in (1, 2, 4, 8, 16):
        return None
    seed = seed_of(dtype, whole)
    wanted = np.frombuffer(one, "<u4") - np.frombuffer(other, "<u4")
    table = key_table().view(np.uint32).reshape(-1, 2, 4)  # by word, piece and sum
    keys = np.ascontiguousarray(table.T)
    for block, matrix in zip(
        blocks, block_matrices(seed, np.array(blocks, np.uint64)), strict=True
    ):
        found = _changed_word(keys, matrix, wanted)
        if found is not None:
            word, low, high = found
            return _element(block * (BLOCK // 4) + word, low, high, itemsize, whole)
    return None


def _blocks(
    shape: tuple[int, ...], shard: Shard | None, whole: tuple[int, ...], itemsize: int
) -> range:
    """Return the blocks in which the array has its elements."""
    if 0 in shape:
        return range(0)
    offsets = (0,) * len(whole) if shard is None else shard.offsets
    sizes = (1,) * (len(whole) - len(shape)) + shape
    first = last = 0
    for length, offset, size in zip(whole, offsets, sizes, strict=True):
        first = first * length + offset
        last = last * length + offset + size - 1
    return range(first * itemsize // BLOCK, last * itemsize // BLOCK + 1)


def _changed_word(
    keys: NDArray[np.uint32], matrix: NDArray[np.uint32], wanted: NDArray[np.uint32]
) -> tuple[int, int, int] | None:
    """Return which word of a block changed, and how much its lower and its upper piece did."""
    words = np.arange(keys.shape[2])
    for rows in (slice(0, 2), slice(2, 4)):
        equations = np.einsum("rk,kpw->rpw", matrix[rows], keys)
        places, changes, unsolved = _solutions(equations, wanted[rows])
        for place, change in zip(places, changes, strict=True):
            sums = np.einsum("rk,kp,p->r", matrix, keys[:, :, place], change.view(np.uint32))
            if np.array_equal(sums, wanted):
                return int(words[place]), int(change[0]), int(change[1])
        words, keys = words[unsolved], keys[:, :, unsolved]
    return None


def _solutions(
    keys: NDArray[np.uint32], wanted: NDArray[np.uint32]
) -> tuple[NDArray[np.intp], NDArray[np.int32], NDArray[np.intp]]:
    """Solve two equations for the changes of two pieces, by Cramer's rule modulo 2**32.

    Returns where there are solutions, these, and where the keys allow too many of them.
    """
    (a, b), (c, d) = keys
    determinant = a * d - b * c
    low = determinant & (~determinant + np.uint32(1))  # the power of two in it
    shift = np.log2(np.maximum(low, 1)).astype(np.uint32)
    odd = determinant >> shift
    inverse = odd * np.uint32(3) ^ np.uint32(2)
    for _ in range(3):
        inverse *= np.uint32(2) - odd * inverse
    first, second = wanted
    scaled = np.stack([first * d - b * second, a * second - first * c])
    changes = ((scaled >> shift) * inverse << shift).view(np.int32) >> shift.view(np.int32)
    solved = (low > 0) & (low < _HALF)
    fits = (scaled & (low - np.uint32(1)) == 0) & (np.abs(changes) < _HALF)
    places = np.flatnonzero(solved & fits.all(0))
    return places, changes.T[places], np.flatnonzero(~solved)


def _element(
    word: int, low: int, high: int, itemsize: int, whole: tuple[int, ...]
) -> ChangedElement | None:
    if low and high and itemsize < 4:
        return None  # two elements
    piece, size = (2 * word, abs(low)) if low else (2 * word + 1, abs(high))
    lowest = (size & -size).bit_length() - 1
    address = piece * 2 + lowest // 8
    start = address // itemsize * itemsize  # of the element
    bits = size >> max(0, (start - piece * 2) * 8)
    if bits >> 8 * itemsize:
        return None  # it reaches into the next element
    index = np.unravel_index(start // itemsize, whole) if whole else ()
    only = size == 1 << lowest and not (low and high)
    bit = (address - start) * 8 + lowest % 8
    return ChangedElement(tuple(int(i) for i in index), bit if only else None)
