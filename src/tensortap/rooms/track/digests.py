"""Digests of observed tensors that do not depend on how the tensors are split into shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tensortap.core.record import Shard, TensorData
from tensortap.rooms.track.shard_digest import shard_digest
from tensortap.values.adapters import adapter_of
from tensortap.values.snapshot import borrow
from tensortap.values.view import as_numpy


class PendingDigest(NamedTuple):
    """A digest that a device is still computing; `resolve` waits for it."""

    ready: Callable[[], bool]
    resolve: Callable[[], bytes]


def shard_digest_of(value: Any, shard: Shard | None = None) -> bytes | PendingDigest | None:
    """Return the digest of a tensor that does not depend on its layout; None for other values.

    `shard` is the part of the whole that it is. A tensor on a device is copied; its digest waits.

    >>> import numpy as np
    >>> len(shard_digest_of(np.ones(3)))
    25
    """
    view = adapter_of(type(value)).view
    array = view(value) if view is not None else None
    if array is not None:
        return shard_digest(array, shard)
    node = borrow(value)
    if not isinstance(node, TensorData):
        return None
    if not hasattr(node.data, "ready"):
        return shard_digest(as_numpy(node), shard)
    # its bytes are still on their way
    return PendingDigest(node.data.ready, lambda: shard_digest(as_numpy(node), shard))
