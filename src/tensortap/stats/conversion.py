"""Lossless conversion of any numeric array to float64.

The processor may read subnormal numbers as zeros: `torch.set_flush_denormal(True)` makes it do so
for this thread, and for NumPy as well. Conversions therefore handle subnormals by their bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.core.dtypes import DTYPES, numpy_dtype

Float64 = NDArray[np.float64]

_GROUP = 1000  # exponents of longdouble that share a piece: float64 holds twice that range


class Piece(NamedTuple):
    """Values as float64, to be multiplied by ``2**shift``.

    `ruler`, if given, is the same rounded towards zero, which keeps the exact exponents.
    """

    values: Float64
    ruler: Float64 | None = None
    shift: int = 0


def complex_part(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return the dtype of the real and imaginary parts, or None for real numbers.

    >>> import numpy as np
    >>> complex_part(np.dtype("complex64")), complex_part(np.dtype("float32"))
    (dtype('float32'), None)
    """
    if dtype.kind == "c":
        return np.dtype(f"f{dtype.itemsize // 2}")
    if dtype.fields is not None and set(dtype.fields) == {"real", "imag"}:
        half: np.dtype[Any] = dtype.fields["real"][0]
        return half
    row = DTYPES.get(dtype.name)
    return numpy_dtype(row.part) if row is not None and row.part else None


@functools.cache
def is_number(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype holds numbers."""
    # the dtypes of ml_dtypes have the kind void, like raw bytes and records
    numeric = dtype.kind in "biufc" or (dtype.kind in "VW" and dtype.type is not np.void)
    return numeric or complex_part(dtype) is not None


def check_numeric(dtype: np.dtype[Any]) -> None:
    """Raise TypeError for an array that does not hold numbers."""
    if not is_number(dtype):
        raise TypeError(f"no statistics for dtype {dtype}: it does not hold numbers")


def is_wide(dtype: np.dtype[Any]) -> bool:
    """Return whether values have more digits or a larger range than float64."""
    return dtype.itemsize >= (8 if dtype.kind in "iu" else 9) and dtype.kind in "iuf"


def pieces(chunk: NDArray[Any]) -> Iterator[Piece]:
    """Yield the exact values of a chunk; complex numbers by their magnitude.

    >>> import numpy as np
    >>> [piece.values.tolist() for piece in pieces(np.array([3 + 4j]))]
    [[5.0]]
    """
    part = complex_part(chunk.dtype)
    if part is not None:
        yield from _magnitudes(chunk, part)
    elif not is_wide(chunk.dtype):
        yield Piece(as_float64(chunk))
    elif chunk.dtype.kind == "f":
        yield from _long(chunk)
    else:
        yield _integers(chunk)


def as_float64(chunk: NDArray[Any]) -> Float64:
    """Return real numbers as float64, exactly unless the dtype `is_wide`.

    >>> import numpy as np
    >>> as_float64(np.array([True, False]))
    array([1., 0.])
    """
    name = chunk.dtype.name
    if name == "float32":
        return _float32(chunk)
    if name == "bfloat16":
        high = chunk.view(np.uint16).astype(np.uint32)
        return _float32((high << np.uint32(16)).view(np.float32))
    values = chunk.astype(np.float64)
    if name == "float8_e8m0fnu":
        values[chunk.view(np.uint8) == 0] = 2.0**-127  # a subnormal float32 on the way
    return values


def as_real(chunk: NDArray[Any]) -> Float64:
    """Return real numbers as float64, and of complex numbers the magnitudes.

    >>> import numpy as np
    >>> as_real(np.array([[3 + 4j, 1]]))
    array([[5., 1.]])
    """
    if complex_part(chunk.dtype) is None:
        return as_float64(chunk)
    magnitudes: Float64 = np.hypot(*map(as_float64, real_and_imag(chunk)))
    return magnitudes


def real_and_imag(chunk: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return views of both parts of complex numbers."""
    if chunk.dtype.fields is not None:
        return chunk["real"], chunk["imag"]
    if chunk.dtype.kind == "c":
        return chunk.real, chunk.imag
    both: NDArray[Any] = chunk[..., None].view(complex_part(chunk.dtype))  # type: ignore[arg-type]
    return both[..., 0], both[..., 1]


def _float32(chunk: NDArray[np.float32]) -> Float64:
    values = chunk.astype(np.float64)
    if np.array([1], np.uint32).view(np.float32).astype(np.float64)[0] == 0.0:  # flushing is on
        bits = chunk.view(np.uint32)
        lost = (bits & np.uint32(0x7F800000)) == 0
        sign = np.where(bits[lost] >> np.uint32(31), -1.0, 1.0)
        values[lost] = sign * (bits[lost] & np.uint32(0x7FFFFF)).astype(np.float64) * 2.0**-149
    return values


def _integers(chunk: NDArray[Any]) -> Piece:
    values = chunk.astype(np.float64)
    if not values.size or max(-values.min(), values.max()) < 2.0**53:
        return Piece(values)
    # as uint64, the absolute value of -2**63 is right again
    size = np.abs(chunk).view(np.uint64)
    # float64 holds 53 bits: without the last 11, nothing is rounded up
    kept = np.where(size >> np.uint64(53), size & ~np.uint64(0x7FF), size)
    return Piece(values, kept.astype(np.float64))


def _long(chunk: NDArray[np.longdouble]) -> Iterator[Piece]:
    exponents = np.where(np.isfinite(chunk) & (chunk != 0), np.frexp(chunk)[1], 0)
    groups = np.rint(exponents / _GROUP).astype(np.int64)
    for group in np.unique(groups).tolist():
        exact = np.ldexp(chunk[groups == group], -_GROUP * group)
        values = exact.astype(np.float64)
        rounded_up = np.abs(values) > np.abs(exact)
        ruler = np.where(rounded_up, np.nextafter(values, 0.0), values)
        yield Piece(values, ruler, _GROUP * group)


def _magnitudes(chunk: NDArray[Any], part: np.dtype[Any]) -> Iterator[Piece]:
    real, imag = real_and_imag(chunk)
    if part.itemsize < 8:  # float64 holds the squares; NaN takes precedence over Inf
        x, y = as_float64(real), as_float64(imag)
        yield Piece(np.sqrt(x * x + y * y))
        return
    size = np.hypot(real, imag)
    size[np.isnan(real) | np.isnan(imag)] = np.nan
    if part.itemsize > 8:
        yield from _long(size)
        return
    beyond = np.isinf(size) & np.isfinite(real) & np.isfinite(imag)
    yield Piece(size[~beyond] if beyond.any() else size)
    if beyond.any():
        yield Piece(np.hypot(real[beyond] / 4, imag[beyond] / 4), shift=2)
