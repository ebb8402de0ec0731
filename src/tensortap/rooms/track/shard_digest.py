"""Compute digests of tensors that do not depend on how a tensor is split: see `stats.shard_digest`.

They are four sums over the elements, which stats/kernel/digest.c explains. NumPy computes them
where the kernel was not built.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.core.record import Shard
from tensortap.stats.shard_digest import packed
from tensortap.stats.summarize import code_of, kernel

BLOCK = 8192  # bytes; twice PIECES in stats/kernel/variants.h
_KEY_STEP = 32
_WORDS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}
_U64 = np.uint64


def shard_digest(array: NDArray[Any], shard: Shard | None = None) -> bytes:
    """Return 25 bytes that depend on the dtype, the whole shape, and each element and its place."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    whole, offsets = array.shape, (0,) * array.ndim
    if shard is not None:
        whole, offsets = shard.global_shape, shard.offsets
        array = array.reshape((1,) * (len(whole) - array.ndim) + array.shape)  # one of a stack
        check_place(array.shape, shard)
    seed = _seed(array.dtype, whole)
    code = code_of(_WORDS.get(array.itemsize, ""))
    if code is None:
        sums = _digest_in_numpy(array, whole, offsets, seed)
    else:
        strides = None if array.flags.c_contiguous else array.strides
        address = array.__array_struct__
        sums = kernel.digest(address, code, array.shape, strides, whole, offsets, seed)
    return packed(seed, *sums)


@functools.lru_cache(maxsize=4096)
def _seed(dtype: np.dtype[Any], whole: tuple[int, ...]) -> int:
    return seed_of(dtype.name, whole)  # a name takes as long as the digest of 64 KiB


@functools.lru_cache(maxsize=4096)
def seed_of(dtype: str, whole: tuple[int, ...]) -> int:
    """Return the seed of the keys for tensors of a dtype and a shape."""
    import xxhash

    return xxhash.xxh3_64_intdigest(f"{dtype} {tuple(whole)}".encode())


@functools.cache
def key_table() -> NDArray[np.int32]:
    """Return the four keys of each piece of 16 bits in a block."""
    pieces = BLOCK // 2
    numbers = np.arange((pieces + 3 * _KEY_STEP) // 4, dtype=_U64)
    keys = _mixed(0, numbers).view(np.int16)
    shifted = (keys[k * _KEY_STEP : k * _KEY_STEP + pieces] for k in range(4))
    return np.stack(list(shifted), axis=1).astype(np.int32)


def block_matrices(seed: int, blocks: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Return the matrix of 4 × 4 keys of each block."""
    numbers = np.add.outer(blocks * _U64(8), np.arange(8, dtype=_U64))
    return _mixed(seed, numbers).view(np.uint32).reshape(-1, 4, 4)


def check_place(shape: tuple[int, ...], shard: Shard) -> None:
    """Raise ValueError for an array that is no such part of the whole."""
    whole, offsets = shard.global_shape, shard.offsets
    inside = len(whole) == len(offsets) == len(shape) and all(
        start >= 0 and start + size <= end
        for start, size, end in zip(offsets, shape, whole, strict=True)
    )
    if not inside:
        raise ValueError(f"an array of shape {list(shape)} is no part of {shard}")


def _digest_in_numpy(
    array: NDArray[Any], whole: tuple[int, ...], offsets: tuple[int, ...], seed: int
) -> list[int]:
    width = math.gcd(array.itemsize, 2)
    values = np.ascontiguousarray(array).reshape(-1).view(f"u{width}").astype(np.uint16)
    numbers = np.zeros((1,) * array.ndim, _U64)
    for axis, (size, start) in enumerate(zip(array.shape, offsets, strict=True)):
        stride = math.prod(whole[axis + 1 :])
        along = (np.arange(size, dtype=_U64) + _U64(start)) * _U64(stride)
        numbers = numbers + along.reshape(-1, *(1,) * (array.ndim - axis - 1))
    parts = np.arange(0, array.itemsize, width, dtype=_U64)
    at = (numbers.reshape(-1, 1) * _U64(array.itemsize) + parts).reshape(-1)
    if not at.size:
        return [0] * 4
    pieces = (values << (at % _U64(2) * _U64(8)).astype(np.uint16)).view(np.int16)
    products = pieces[:, None] * key_table()[at % _U64(BLOCK) // _U64(2)]
    blocks, starts = np.unique(at // _U64(BLOCK), return_index=True)
    inner = np.add.reduceat(products.view(np.uint32), starts, dtype=np.uint32)
    outer = block_matrices(seed, blocks) * inner[:, None]
    sums: list[int] = outer.sum((0, 2), dtype=np.uint32).tolist()
    return sums


def _mixed(seed: int, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    first = mix_bits(np.array([seed], _U64))
    return mix_bits(first + (numbers + _U64(1)) * _U64(0x9E3779B97F4A7C15))


def mix_bits(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return numbers with their bits mixed: the finalizer of splitmix64."""
    z = (z ^ (z >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> _U64(27))) * _U64(0x94D049BB133111EB)
    return z ^ (z >> _U64(31))
