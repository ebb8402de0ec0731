"""The digest of a JAX array, by operations of JAX; see `tensortap.stats.shard_digest`.

All numbers have 32 bits, because JAX has no others by default; a sum modulo 2**64 is a reduction of
pairs that carries.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tensortap.frameworks.jax.adapter import Deferred
from tensortap.frameworks.protocol import PendingDigest
from tensortap.record import Shard
from tensortap.stats.shard_digest import KEYS, block_masks, key_table, packed, seed_of

_MOST = 1 << 32  # words whose positions have 32 bits
_PIECES = {1: jnp.uint8, 2: jnp.uint16}


def can_digest(array: Any, shard: Shard | None) -> bool:
    """Return whether the positions of an array fit into 32 bits."""
    whole = array.shape if shard is None else shard.global_shape
    return bool(math.prod(whole) * max(array.dtype.itemsize, 4) // 4 < _MOST)


def digest_later(array: jax.Array, shard: Shard | None = None) -> PendingDigest:
    """Start to compute a digest on the device of an array.

    >>> from tensortap.stats.shard_digest import shard_digest
    >>> digest_later(jnp.arange(5.0)).resolve() == shard_digest(np.arange(5, dtype="float32"))
    True
    """
    whole = array.shape if shard is None else shard.global_shape
    offsets = (0,) * array.ndim if shard is None else shard.offsets
    seed = seed_of(array.dtype.name, whole)
    blocks = -(-(math.prod(whole) * array.dtype.itemsize // 4 + 1) // KEYS)
    masks = block_masks(seed, blocks)
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        words = Deferred(_sums(array, masks, tuple(whole), tuple(offsets)), 16)

    def resolve() -> bytes:
        first, second = np.frombuffer(words.view, np.uint64).tolist()
        return packed(seed, first, second)

    return PendingDigest(words.ready, resolve)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _sums(
    array: jax.Array, masks: jax.Array, whole: tuple[int, ...], offsets: tuple[int, ...]
) -> jax.Array:
    """Return both sums, each as its lower and its upper half."""
    if not array.size:
        return jnp.zeros(4, jnp.uint32)
    itemsize = array.dtype.itemsize
    numbers = _numbers(array.shape, whole, offsets)
    bits = _bits(array)
    if itemsize < 4:  # a part of a word
        per = 4 // itemsize
        word, shift = numbers // per, numbers % per * (8 * itemsize)
        value = bits.astype(jnp.uint32) << shift
    else:
        per = itemsize // 4
        word = (numbers[:, None] * per + jnp.arange(per, dtype=jnp.uint32)).reshape(-1)
        value = bits
    keys = jnp.asarray(key_table())
    place, block = word % KEYS, word // KEYS
    found: list[jax.Array] = []
    for each, x in enumerate((value, value << 16 | value >> 16)):
        low, high = keys[each, 0, place], keys[each, 1, place]
        top = (high + masks[each, 1, block]) ^ low
        bottom = (low + masks[each, 0, block]) ^ high
        low_half, high_half = _product(x, bottom)
        found += _sum(low_half, high_half + x * top)
    return jnp.stack(found)


def _bits(array: jax.Array) -> jax.Array:
    """Return the elements, flat: words of 32 bits, or numbers of 8 or 16 bits."""
    flat = jnp.ravel(array)
    if flat.dtype == jnp.bool_:
        return flat.astype(jnp.uint8)
    if jnp.issubdtype(flat.dtype, jnp.complexfloating):
        flat = jnp.stack([flat.real, flat.imag], axis=1).reshape(-1)
    unsigned = _PIECES.get(flat.dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(flat, unsigned).reshape(-1)


def _numbers(shape: tuple[int, ...], whole: Any, offsets: Any) -> jax.Array:
    """Return the positions of the elements in the whole tensor."""
    shape = (1,) * (len(whole) - len(shape)) + shape  # one of a stack
    numbers = jnp.zeros((1,) * len(shape), jnp.uint32)
    for axis, (size, start) in enumerate(zip(shape, offsets, strict=True)):
        along = (jnp.arange(size, dtype=jnp.uint32) + start) * math.prod(whole[axis + 1 :])
        numbers = numbers + along.reshape(-1, *(1,) * (len(shape) - axis - 1))
    return numbers.reshape(-1)


def _product(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the product of words as lower and upper halves."""
    x_low, x_high, y_low, y_high = x & 0xFFFF, x >> 16, y & 0xFFFF, y >> 16
    middle = x_high * y_low + (x_low * y_low >> 16)
    crossed = x_low * y_high + (middle & 0xFFFF)
    return x * y, x_high * y_high + (middle >> 16) + (crossed >> 16)


def _sum(low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the sum of numbers that are given as halves, modulo 2**64."""

    def add(a: Any, b: Any) -> Any:
        total = a[0] + b[0]
        return total, a[1] + b[1] + (total < a[0]).astype(jnp.uint32)

    zero = np.uint32(0)
    found: tuple[jax.Array, jax.Array] = lax.reduce((low, high), (zero, zero), add, (0,))
    return found
