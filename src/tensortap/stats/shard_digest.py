"""The format of digests that do not depend on how a tensor is split: those of its shards add up.

`tensortap.stats.digest` is for whole values; `tensortap.rooms.track.shard_digest` computes these.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

_FORMAT = struct.Struct("<BQ4I")  # version, hash of dtype and shape (zeros add nothing), sums
SIZE = _FORMAT.size
"""Bytes of a digest."""

_VERSION = 1
_MODULUS = 1 << 32


def packed(seed: int, *sums: int) -> bytes:
    """Return a digest, given its four sums modulo 2**32."""
    return _FORMAT.pack(_VERSION, seed, *(each % _MODULUS for each in sums))


def is_shard_digest(digest: bytes | None) -> bool:
    """Return whether this is such a digest, not one of a whole value."""
    return digest is not None and len(digest) == SIZE and digest[0] == _VERSION


def add_digests(digests: Iterable[bytes]) -> bytes:
    """Return the digest of a tensor, given those of its shards."""
    versions, kinds, *sums = zip(*map(_FORMAT.unpack, digests), strict=True)
    return _FORMAT.pack(versions[0], kinds[0], *(sum(column) % _MODULUS for column in sums))
