"""Adapters for plain Python values: numbers, text, bytes, and objects known only by their repr."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from tensortap.buffers import Pool
from tensortap.frameworks.protocol import Adapter, Path, Snapshot, no_description, type_name
from tensortap.record import Blob, Number, Opaque, Value

REPR = 500
"""Characters of an object's repr that are kept."""


def _unchanged(nbytes: int) -> Adapter:
    return Adapter(lambda value, pool, path: (value, nbytes), lambda value, path: nbytes,
                   no_description)  # fmt: skip


def _adapter(node: Callable[[Any], Value], nbytes: Callable[[Any], int]) -> Adapter:
    return Adapter(
        lambda value, pool, path: (node(value), nbytes(value)),
        lambda value, path: nbytes(value),
        no_description,
    )


def _int(value: int) -> Value:
    if -0x8000000000000000 <= value <= 0x7FFFFFFFFFFFFFFF:
        return value
    # hex: decimal text takes quadratic time, and Python limits it to 4300 digits
    return Number("int", text=hex(value))


def _int_nbytes(value: int) -> int:
    return max(8, (value.bit_length() + 7) // 8)


def _snapshot_int(value: int, pool: Pool | None = None, path: Path = ()) -> Snapshot:
    return _int(value), _int_nbytes(value)


def _str_nbytes(value: str) -> int:
    if value.isascii():
        return len(value)
    try:
        return len(value.encode())
    except UnicodeEncodeError:  # lone surrogates
        return 0


def _str(value: str) -> Value:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:  # neither a message nor a file can carry lone surrogates
        return Opaque("builtins.str", repr(value)[:REPR])
    return value


def safe_repr(value: object, limit: int = REPR) -> str:
    """Return the repr of any object, truncated and valid in UTF-8, even if its own code raises."""
    try:
        text = repr(value)
    except Exception as error:  # the user's code
        text = f"<repr raised {type(error).__name__}>"
    return text[:limit].encode("utf-8", "backslashreplace").decode()[:limit]


SCALARS: dict[type, Adapter] = {
    type(None): _unchanged(0),
    bool: _unchanged(1),
    int: Adapter(
        _snapshot_int, lambda value, path: _int_nbytes(value), no_description, _snapshot_int
    ),
    float: _unchanged(8),
    complex: _adapter(lambda value: Number("complex", (value.real, value.imag)), lambda value: 16),
    str: _adapter(_str, _str_nbytes),
    bytes: _adapter(lambda value: Blob("bytes", value), len),
    bytearray: _adapter(lambda value: Blob("bytearray", bytes(value)), len),
}

OPAQUE = _adapter(lambda value: Opaque(type_name(type(value)), safe_repr(value)), lambda value: 0)

# the plain value of an instance of a subclass, without running code of the subclass
_PLAIN: dict[type, Any] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: lambda value: bytes(memoryview(value)),
    bytearray: lambda value: bytearray(memoryview(value)),
}


def adapter(cls: type) -> Adapter | None:
    """Return the adapter for a class of plain values; a subclass is captured as its base."""
    if enum.Enum in cls.__mro__:
        return OPAQUE  # the name of a member says more than its value
    for base, plain in _PLAIN.items():
        if base in cls.__mro__:
            return _adapter_of_subclass(SCALARS[base], plain)
    return None


def _adapter_of_subclass(base: Adapter, plain: Callable[[Any], Any]) -> Adapter:
    return Adapter(
        lambda value, pool, path: base.snapshot(plain(value), pool, path),
        lambda value, path: base.nbytes(plain(value), path),
        no_description,
    )
