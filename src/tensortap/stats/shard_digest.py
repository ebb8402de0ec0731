"""A digest of a tensor that does not depend on how the tensor is split: those of its shards add up.

`tensortap.stats.digest` is for whole values. This one is a pair of sums over the elements, which
kernel/digest.c explains; NumPy computes it where the kernel was not built, and operations of the
frameworks on their devices, from the same keys.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.record import Shard
from tensortap.stats.summarize import code_of, kernel

_FORMAT = struct.Struct("<BIQQ")  # version, hash of dtype and shape (zeros add nothing), sums
_VERSION = 1
KEYS = 1024
_WORDS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}
_MODULUS = 1 << 64
_U64 = np.uint64
_LOW = _U64(0xFFFFFFFF)


def shard_digest(array: NDArray[Any], shard: Shard | None = None) -> bytes:
    """Return 21 bytes that depend on the dtype, the whole shape, and each element and its place.

    >>> whole = np.arange(12.0).reshape(3, 4)
    >>> left, right = (shard_digest(whole[:, i : i + 2], Shard((3, 4), (0, i))) for i in (0, 2))
    >>> add_digests([left, right]) == shard_digest(whole)
    True
    """
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    whole, offsets = array.shape, (0,) * array.ndim
    if shard is not None:
        whole, offsets = shard.global_shape, shard.offsets
        array = array.reshape((1,) * (len(whole) - array.ndim) + array.shape)  # one of a stack
        _check_place(array.shape, shard)
    seed = seed_of(array.dtype.name, whole)
    code = code_of(_WORDS.get(array.itemsize, ""))
    if code is None:
        sums = _digest_in_numpy(array, whole, offsets, seed)
    else:
        strides = None if array.flags.c_contiguous else array.strides
        address = array.__array_interface__["data"][0]
        sums = kernel.digest(address, code, array.shape, strides, whole, offsets, seed)
    return packed(seed, *sums)


@functools.lru_cache(maxsize=4096)
def seed_of(dtype: str, whole: tuple[int, ...]) -> int:
    """Return the seed of the keys for tensors of a dtype and a shape."""
    import xxhash

    return xxhash.xxh3_64_intdigest(f"{dtype} {tuple(whole)}".encode())


def packed(seed: int, first: int, second: int) -> bytes:
    """Return a digest, given its sums modulo 2**64.

    >>> is_shard_digest(packed(7, -1, 0))
    True
    """
    return _FORMAT.pack(_VERSION, seed & 0xFFFFFFFF, first % _MODULUS, second % _MODULUS)


def block_masks(seed: int, blocks: int) -> NDArray[np.uint32]:
    """Return what changes the keys from block to block: by sum, low and high half, and block."""
    return _halves(_mixed(seed, np.arange(2 * blocks, dtype=_U64).reshape(blocks, 2).T))


@functools.cache
def key_table() -> NDArray[np.uint32]:
    """Return the keys of a block of words: by sum, low and high half, and place in the block."""
    return block_masks(0, KEYS)


def _halves(keys: NDArray[np.uint64]) -> NDArray[np.uint32]:
    return np.stack([keys & _LOW, keys >> _U64(32)], axis=1).astype(np.uint32)


def sums_of(digest: bytes) -> bytes:
    """Return the 16 bytes of a digest that depend on the elements."""
    return digest[-16:]


def is_shard_digest(digest: bytes | None) -> bool:
    """Return whether this is such a digest, not one of a whole value."""
    return digest is not None and len(digest) == _FORMAT.size and digest[0] == _VERSION


def add_digests(digests: Iterable[bytes]) -> bytes:
    """Return the digest of a tensor, given those of its shards."""
    versions, kinds, *sums = zip(*map(_FORMAT.unpack, digests), strict=True)
    return _FORMAT.pack(versions[0], kinds[0], *(sum(column) % _MODULUS for column in sums))


def _check_place(shape: tuple[int, ...], shard: Shard) -> None:
    whole, offsets = shard.global_shape, shard.offsets
    inside = len(whole) == len(offsets) == len(shape) and all(
        start >= 0 and start + size <= end
        for start, size, end in zip(offsets, shape, whole, strict=True)
    )
    if not inside:
        raise ValueError(f"an array of shape {list(shape)} is no part of {shard}")


def _digest_in_numpy(
    array: NDArray[Any], whole: tuple[int, ...], offsets: tuple[int, ...], seed: int
) -> tuple[int, int]:
    width = math.gcd(array.itemsize, 4)
    values = np.ascontiguousarray(array).reshape(-1).view(f"u{width}").astype(_U64)
    numbers = np.zeros((1,) * array.ndim, _U64)
    for axis, (size, start) in enumerate(zip(array.shape, offsets, strict=True)):
        stride = math.prod(whole[axis + 1 :])
        along = (np.arange(size, dtype=_U64) + _U64(start)) * _U64(stride)
        numbers = numbers + along.reshape(-1, *(1,) * (array.ndim - axis - 1))
    parts = np.arange(0, array.itemsize, width, dtype=_U64)
    at = (numbers.reshape(-1, 1) * _U64(array.itemsize) + parts).reshape(-1)
    words = values << (at % _U64(4) * _U64(8))
    turned = (words << _U64(16) | words >> _U64(16)) & _LOW
    sums = (np.sum(x * word_keys(seed, at // _U64(4), i)) for i, x in enumerate((words, turned)))
    first, second = map(int, sums)
    return first, second


def word_keys(seed: int, numbers: NDArray[np.uint64], each: int) -> NDArray[np.uint64]:
    """Return the keys of words for one of the sums."""
    places, blocks = numbers % _U64(KEYS), numbers // _U64(KEYS)
    key = _mixed(0, places * _U64(2) + _U64(each))
    mask = _mixed(seed, blocks * _U64(2) + _U64(each))
    low, high = key & _LOW, key >> _U64(32)
    top = (high + (mask >> _U64(32)) & _LOW) ^ low
    return top << _U64(32) | ((low + mask & _LOW) ^ high)


def _mixed(seed: int, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    first = mix_bits(np.array([seed], _U64))
    return mix_bits(first + (numbers + _U64(1)) * _U64(0x9E3779B97F4A7C15))


def mix_bits(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return numbers with their bits mixed: the finalizer of splitmix64."""
    z = (z ^ (z >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> _U64(27))) * _U64(0x94D049BB133111EB)
    return z ^ (z >> _U64(31))
