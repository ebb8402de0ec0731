"""The digest of a JAX array, by operations of JAX; see `tensortap.stats.shard_digest`.

All numbers have 32 bits, because JAX has no others by default.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tensortap.core.record import Shard
from tensortap.stats.shard_digest import BLOCK, block_matrices, key_table, packed, seed_of
from tensortap.values.jax.adapter import Deferred
from tensortap.values.protocol import PendingDigest

_MOST = 1 << 32  # elements whose positions have 32 bits


def can_digest(array: Any, shard: Shard | None) -> bool:
    """Return whether the positions of an array fit into 32 bits."""
    whole = array.shape if shard is None else shard.global_shape
    return bool(math.prod(whole) < _MOST)


def digest_later(array: jax.Array, shard: Shard | None = None) -> PendingDigest:
    """Start to compute a digest on the device of an array.

    >>> from tensortap.stats.shard_digest import shard_digest
    >>> digest_later(jnp.arange(5.0)).resolve() == shard_digest(np.arange(5, dtype="float32"))
    True
    """
    whole = array.shape if shard is None else shard.global_shape
    offsets = (0,) * array.ndim if shard is None else shard.offsets
    seed = seed_of(array.dtype.name, whole)
    blocks = math.prod(whole) * array.dtype.itemsize // BLOCK + 1
    matrices = block_matrices(seed, np.arange(blocks, dtype=np.uint64))
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        sums = Deferred(_sums(array, matrices, tuple(whole), tuple(offsets)), 16)

    def resolve() -> bytes:
        return packed(seed, *np.frombuffer(sums.view, np.uint32).tolist())

    return PendingDigest(sums.ready, resolve)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _sums(
    array: jax.Array, matrices: jax.Array, whole: tuple[int, ...], offsets: tuple[int, ...]
) -> jax.Array:
    if not array.size:
        return jnp.zeros(4, jnp.uint32)
    itemsize = array.dtype.itemsize
    numbers = _numbers(array.shape, whole, offsets)
    place, block = numbers % (BLOCK // itemsize), numbers // (BLOCK // itemsize)
    pieces = _pieces(array).astype(jnp.uint32)
    if itemsize == 1:  # half of a piece
        pieces, place = pieces << place[:, None] % 2 * 8, place // 2
    pieces = (pieces ^ 0x8000) - 0x8000  # they have a sign
    keys = jnp.asarray(key_table().view(np.uint32)).reshape(-1, pieces.shape[1], 4)
    inner = [
        sum(pieces[:, i] * keys[place, i, column] for i in range(pieces.shape[1]))
        for column in range(4)
    ]
    rows = [
        sum(matrices[block, row, column] * inner[column] for column in range(4)) for row in range(4)
    ]
    # XLA makes one loop of a single reduction, without large temporary arrays
    zeros = [np.uint32(0)] * 4
    return jnp.stack(lax.reduce(rows, zeros, lambda a, b: jax.tree.map(lax.add, a, b), (0,)))


def _pieces(array: jax.Array) -> jax.Array:
    """Return the bits of each element: numbers of 16 bits, or one of 8 bits."""
    flat = jnp.ravel(array)
    if flat.dtype == jnp.bool_:
        flat = flat.astype(jnp.uint8)
    if jnp.issubdtype(flat.dtype, jnp.complexfloating):
        flat = jnp.stack([flat.real, flat.imag], axis=1)
    unsigned = jnp.uint8 if flat.dtype.itemsize == 1 else jnp.uint16
    return lax.bitcast_convert_type(flat, unsigned).reshape(array.size, -1)


def _numbers(shape: tuple[int, ...], whole: Any, offsets: Any) -> jax.Array:
    """Return the positions of the elements in the whole tensor."""
    shape = (1,) * (len(whole) - len(shape)) + shape  # one of a stack
    numbers = jnp.zeros((1,) * len(shape), jnp.uint32)
    for axis, (size, start) in enumerate(zip(shape, offsets, strict=True)):
        along = (jnp.arange(size, dtype=jnp.uint32) + start) * math.prod(whole[axis + 1 :])
        numbers = numbers + along.reshape(-1, *(1,) * (len(shape) - axis - 1))
    return numbers.reshape(-1)
