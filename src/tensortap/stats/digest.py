"""The digest of a snapshot: equal for equal values, in every framework and process."""

from __future__ import annotations

import functools
import struct
from typing import Any

from tensortap.core.buffers import view_of
from tensortap.core.record import Blob, Fields, Items, Mapping, Number, Opaque, TensorData, Value

_LENGTH = struct.Struct("<q").pack


@functools.lru_cache(4096)
def tensor_head(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return what the digest of a tensor hashes before its bytes."""
    name, sizes = dtype.encode(), struct.pack(f"<{len(shape)}q", *shape)
    return b"".join((b"t", _LENGTH(len(name)), name, b"s", _LENGTH(len(sizes)), sizes))


def digest(value: Value) -> bytes:
    """Return the xxh3-128 of a tensor's dtype, shape and bytes, or of a whole tree."""
    import xxhash  # late: `import tensortap` is fast

    hasher = xxhash.xxh3_128()
    _feed(hasher, value)
    return bytes(hasher.digest())


def _feed(hasher: Any, value: Value) -> None:
    # A letter and a length lead every part, so that no two trees give the same stream.
    if isinstance(value, TensorData):
        hasher.update(tensor_head(value.dtype, value.shape))
        hasher.update(view_of(value.data))
    elif isinstance(value, float):
        hasher.update(b"f" + struct.pack("<d", value))
    elif value is None or isinstance(value, (bool, int)):
        _part(hasher, b"c", repr(value).encode())
    elif isinstance(value, str):
        _part(hasher, b"u", value.encode())
    elif isinstance(value, Blob):
        _part(hasher, b"b", value.kind.encode())
        _part(hasher, b"b", value.data)
    elif isinstance(value, Number):
        parts = struct.pack(f"<{len(value.parts)}d", *value.parts)
        _part(hasher, b"n", value.kind.encode() + parts)
        _part(hasher, b"n", value.text.encode())
    elif isinstance(value, Opaque):
        _part(hasher, b"o", value.type.encode())
        _part(hasher, b"o", value.repr.encode())
    else:
        _feed_container(hasher, value)


def _feed_container(hasher: Any, value: Items | Mapping | Fields) -> None:
    if isinstance(value, Mapping):
        hasher.update(b"m" + _LENGTH(len(value.items)))
        for key, part in value.items:
            _feed(hasher, key)
            _feed(hasher, part)
    elif isinstance(value, Fields):
        _part(hasher, b"F", "\0".join((value.kind, value.type, *value.names)).encode())
        for part in value.values:
            _feed(hasher, part)
    else:
        _part(hasher, b"i", value.kind.encode())
        hasher.update(_LENGTH(len(value.items)))
        if value.kind in ("set", "frozenset"):
            # the order of a set differs between processes
            hasher.update(b"".join(sorted(digest(part) for part in value.items)))
        else:
            for part in value.items:
                _feed(hasher, part)


def _part(hasher: Any, letter: bytes, data: bytes) -> None:
    hasher.update(letter + _LENGTH(len(data)))
    hasher.update(data)
