"""Adapters for plain Python values: numbers, text, bytes, and objects known only by their repr."""

from __future__ import annotations

import enum
from typing import Any

from tensortap.buffers import Pool
from tensortap.frameworks.protocol import Adapter, Path, Taken, type_name, undescribed
from tensortap.record import Blob, Number, Opaque

REPR = 500
"""An object's repr is cut at this many characters."""


def _take_none(value: None, pool: Pool | None, path: Path) -> Taken:
    return None, 0


def _take_bool(value: bool, pool: Pool | None, path: Path) -> Taken:
    return value, 1


def _take_float(value: float, pool: Pool | None, path: Path) -> Taken:
    return value, 8


def _take_int(value: int, pool: Pool | None, path: Path) -> Taken:
    if -0x8000000000000000 <= value <= 0x7FFFFFFFFFFFFFFF:
        return value, 8
    # hex: decimal text is quadratic to make, and Python refuses it beyond 4300 digits
    return Number("int", text=hex(value)), _int_nbytes(value, path)


def _int_nbytes(value: int, path: Path) -> int:
    return max(8, (value.bit_length() + 7) // 8)


def _take_complex(value: complex, pool: Pool | None, path: Path) -> Taken:
    return Number("complex", (value.real, value.imag)), 16


def _take_str(value: str, pool: Pool | None, path: Path) -> Taken:
    if value.isascii():
        return value, len(value)
    try:
        return value, len(value.encode())
    except UnicodeEncodeError:  # lone surrogates: no message and no file can carry them
        return Opaque("builtins.str", repr(value)[:REPR]), 0


def _str_nbytes(value: str, path: Path) -> int:
    if value.isascii():
        return len(value)
    try:
        return len(value.encode())
    except UnicodeEncodeError:
        return 0


def _take_bytes(value: bytes, pool: Pool | None, path: Path) -> Taken:
    return Blob("bytes", value), len(value)


def _take_bytearray(value: bytearray, pool: Pool | None, path: Path) -> Taken:
    return Blob("bytearray", bytes(value)), len(value)


def _len(value: bytes | bytearray, path: Path) -> int:
    return len(value)


def _take_opaque(value: object, pool: Pool | None, path: Path) -> Taken:
    return Opaque(type_name(type(value)), safe_repr(value)), 0


def safe_repr(value: object, limit: int = REPR) -> str:
    """The repr of any object, cut, fit for UTF-8, whatever its own code does."""
    try:
        text = repr(value)
    except Exception as error:  # somebody else's code: whatever it raises, the type is still known
        text = f"<repr raised {type(error).__name__}>"
    return text[:limit].encode("utf-8", "backslashreplace").decode()[:limit]


SCALARS: dict[type, Adapter] = {
    type(None): Adapter(_take_none, lambda value, path: 0, undescribed),
    bool: Adapter(_take_bool, lambda value, path: 1, undescribed),
    int: Adapter(_take_int, _int_nbytes, undescribed, lambda value: _take_int(value, None, ())),
    float: Adapter(_take_float, lambda value, path: 8, undescribed),
    complex: Adapter(_take_complex, lambda value, path: 16, undescribed),
    str: Adapter(_take_str, _str_nbytes, undescribed),
    bytes: Adapter(_take_bytes, _len, undescribed),
    bytearray: Adapter(_take_bytearray, _len, undescribed),
}

OPAQUE = Adapter(_take_opaque, lambda value, path: 0, undescribed)

# the plain value inside one of a subclass, without running anything of the subclass
_PLAIN: dict[type, Any] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: lambda value: bytes(memoryview(value)),
    bytearray: lambda value: bytearray(memoryview(value)),
}


def adapter(cls: type) -> Adapter | None:
    """The adapter for a class of plain values; their subclasses are caught as the plain value."""
    if enum.Enum in cls.__mro__:
        return OPAQUE  # the name of a member says more than its value
    for base, plain in _PLAIN.items():
        if base in cls.__mro__:
            return _of_subclass(SCALARS[base], plain)
    return None


def _of_subclass(of_base: Adapter, plain: Any) -> Adapter:
    def take(value: Any, pool: Pool | None, path: Path) -> Taken:
        return of_base.take(plain(value), pool, path)

    return Adapter(take, lambda value, path: of_base.nbytes(plain(value), path), undescribed)
