"""Digests of rows: those of tensors make up that of their concatenation; those of shards add up.

``stats/kernel/digest.c`` explains and computes them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from numpy.typing import NDArray

from tensortap.core.errors import TensortapError
from tensortap.core.record import Shard
from tensortap.rooms.track.shard_digest import check_place, seed_of
from tensortap.stats.summarize import code_of, kernel

RING = 5
"""Numbers in a digest, modulo 2**32."""

CASTS = ("bfloat16", "float16")
"""Dtypes to which float32 is rounded, so that digests of casts compare."""

Sums = tuple[int, ...]

_MODULUS = (0x9E3779B1, 0x7F4A7C16, 0xBF58476D, 0x94D049BA, 0x3C6EF372)
_SHORT = 16  # elements: rows of three and more dimensions have at least so many
_LONG = 1 << 20  # elements of a vector whose digest is that of one row
_WORDS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}
_ZEROS: Sums = (0,) * RING


def row_dimensions(shape: Sequence[int]) -> int:
    """Return how many dimensions of a tensor count its rows.

    Of a vector, a row is one element. With more than two dimensions it is the last one, so that a
    stack of matrices is their concatenation; or, of a convolution, all but the first.

    >>> [row_dimensions(shape) for shape in ((), (3,), (4, 5), (8, 4, 64), (16, 3, 3, 3))]
    [0, 1, 1, 2, 1]
    """
    if len(shape) == 1 and shape[0] > _LONG:
        return 0
    if len(shape) > 2 and shape[-1] >= _SHORT:
        return len(shape) - 1
    return min(len(shape), 1)


def rows_and_length(shape: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return how many rows a tensor has, and their shape."""
    outer = row_dimensions(shape)
    return math.prod(shape[:outer]), tuple(shape[outer:])


def digest_rows(
    array: NDArray[Any], dtype: str, shard: Shard | None = None, casts: Sequence[str] = ()
) -> list[Sums]:
    """Return the sums of an array, then those of the array rounded to each of `casts`.

    `dtype` is its name; `casts` are the first of `CASTS`, for float32. A `shard` has those of its
    place in the whole.

    >>> import numpy as np
    >>> x = np.arange(6, dtype=np.float32).reshape(3, 2)
    >>> parts = [digest_rows(part, "float32")[0] for part in (x[:2], x[2:])]
    >>> concatenated(zip(parts, (2, 1))) == digest_rows(x, "float32")[0]
    True
    """
    whole, offsets = array.shape, (0,) * array.ndim
    if shard is not None:
        whole, offsets = shard.global_shape, shard.offsets
        array = array.reshape((1,) * (len(whole) - array.ndim) + array.shape)
        check_place(array.shape, shard)
    if not array.size:
        return [_ZEROS] * (1 + len(casts))
    seeds = tuple(seed_of(name, ()) for name in (dtype, *casts))
    outer = row_dimensions(whole)
    code = code_of(_WORDS.get(array.itemsize, ""))
    if code is None:
        raise TensortapError("digests need the C kernel: install tensortap with a compiler")
    strides = None if array.flags.c_contiguous else array.strides
    found: tuple[Sums, ...] = kernel.digest_rows(
        array.__array_struct__, code, array.shape, strides, whole, offsets, outer, seeds
    )
    return list(found)


def added(parts: Iterable[Sums]) -> Sums:
    """Return the digest of a tensor, given those of its shards."""
    return tuple(sum(column) % (1 << 32) for column in zip(*parts, strict=True))


def concatenated(parts: Iterable[tuple[Sums, int]]) -> Sums:
    """Return the digest of tensors one after the other, given theirs and their numbers of rows."""
    total, rows = _ZEROS, 0
    for sums, count in parts:
        total = added((total, _times(sums, _power_of_x(rows))))
        rows += count
    return total


def _times_x(d: Sequence[int]) -> list[int]:
    return [
        ((d[i - 1] if i else 0) + d[-1] * factor) % (1 << 32) for i, factor in enumerate(_MODULUS)
    ]


def _times(a: Sequence[int], b: Sequence[int]) -> Sums:
    product = [0] * RING
    for factor in reversed(b):
        product = [(p + x * factor) % (1 << 32) for p, x in zip(_times_x(product), a, strict=True)]
    return tuple(product)


@functools.lru_cache(4096)
def _power_of_x(power: int) -> Sums:
    if power < RING:
        return tuple(int(i == power) for i in range(RING))
    half = _power_of_x(power // 2)
    square = _times(half, half)
    return tuple(_times_x(square)) if power % 2 else square
