"""Find the one element in which two tensors differ, from nothing but their digests.

The difference of two digests is a pair of sums over the words that differ. If there is only one, a
position whose keys explain both sums is that word; any other position does with a probability of
about 2**-64. See kernel/digest.c.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.record import Shard
from tensortap.stats.shard_digest import seed_of, word_keys

_CHUNK = 1 << 16  # words
_MOST_WORDS = 1 << 26  # that are searched, in a few seconds
_U64 = np.uint64
_MASK = (1 << 64) - 1
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
    first, last = _words(shape, shard, whole, itemsize)
    if last - first > _MOST_WORDS or itemsize not in (1, 2, 4, 8, 16):
        return None
    seed = seed_of(dtype, whole)
    wanted = [
        (int.from_bytes(a, "little") - int.from_bytes(b, "little")) & _MASK
        for a, b in ((one[:8], other[:8]), (one[8:], other[8:]))
    ]
    for start in range(first, last, _CHUNK):
        numbers = np.arange(start, min(start + _CHUNK, last), dtype=_U64)
        keys = word_keys(seed, numbers, 0)
        for at, change in _solutions(keys, wanted[0]):
            key = int(word_keys(seed, numbers[at : at + 1], 1)[0])
            if any(turned * key & _MASK == wanted[1] for turned in _turned(change)):
                return _element(start + at, change, itemsize, whole)
    return None


def _words(
    shape: tuple[int, ...], shard: Shard | None, whole: tuple[int, ...], itemsize: int
) -> tuple[int, int]:
    """Return the first of the words among which the array has its elements, and their end."""
    if 0 in shape:
        return 0, 0
    offsets = (0,) * len(whole) if shard is None else shard.offsets
    sizes = (1,) * (len(whole) - len(shape)) + shape
    first = last = 0
    for length, offset, size in zip(whole, offsets, sizes, strict=True):
        first = first * length + offset
        last = last * length + offset + size - 1
    return first * itemsize // 4, -(-(last + 1) * itemsize // 4)


def _solutions(keys: NDArray[np.uint64], wanted: int) -> list[tuple[int, int]]:
    """Return where a change of 32 bits times the key is `wanted`, and the changes."""
    low = keys & (~keys + _U64(1))  # the power of two in the key
    shift = np.log2(low.astype(np.float64)).astype(_U64)
    odd = keys >> shift
    inverse = odd * _U64(3) ^ _U64(2)
    for _ in range(4):
        inverse *= _U64(2) - odd * inverse
    total = _U64(wanted)
    change = (((total >> shift) * inverse) << shift).view(np.int64) >> shift.view(np.int64)
    fits = (total & (low - _U64(1)) == 0) & (np.abs(change) < 1 << 32)
    return [(int(at), int(change[at])) for at in np.flatnonzero(fits)]


def _turned(change: int) -> list[int]:
    """Return what a change of a word may be if its halves are exchanged."""
    high, low = divmod(change, _HALF)
    return [_HALF * low + high, _HALF * (low - _HALF) + high + 1]


def _element(
    word: int, change: int, itemsize: int, whole: tuple[int, ...]
) -> ChangedElement | None:
    size = abs(change)
    lowest = (size & -size).bit_length() - 1
    address = word * 4 + lowest // 8
    start = address // itemsize * itemsize  # of the element
    bits = size >> max(0, (start - word * 4) * 8)
    if bits >> 8 * itemsize:
        return None  # it reaches into the next element
    index = np.unravel_index(start // itemsize, whole) if whole else ()
    only = size == 1 << lowest
    bit = (address - start) * 8 + lowest % 8
    return ChangedElement(tuple(int(i) for i in index), bit if only else None)
