"""Conversion of any numeric array to float64; lossless but for 64-bit integers.

The processor may read subnormal numbers as zeros: `torch.set_flush_denormal(True)` makes it do so
for this thread, and for NumPy as well. Conversions therefore handle subnormals by their bits.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.core.dtypes import DTYPES, numpy_dtype

Float64 = NDArray[np.float64]


def complex_part(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return the dtype of the real and imaginary parts, or None for real numbers."""
    if dtype.kind == "c":
        return np.dtype(f"f{dtype.itemsize // 2}")
    if dtype.fields is not None and set(dtype.fields) == {"real", "imag"}:
        half: np.dtype[Any] = dtype.fields["real"][0]
        return half
    row = DTYPES.get(dtype.name)
    return numpy_dtype(row.part) if row is not None and row.part else None


@functools.cache
def is_number(dtype: np.dtype[Any]) -> bool:
    # the dtypes of ml_dtypes have the kind void, like raw bytes and records
    numeric = dtype.kind in "biufc" or (dtype.kind in "VW" and dtype.type is not np.void)
    return numeric or complex_part(dtype) is not None


def check_numeric(dtype: np.dtype[Any]) -> None:
    """Raise TypeError for an array that does not hold numbers, or longer ones than float64."""
    if not is_number(dtype):
        raise TypeError(f"no statistics for dtype {dtype}: it does not hold numbers")
    if dtype.kind in "fc" and (complex_part(dtype) or dtype).itemsize > 8:
        raise TypeError(f"no statistics for dtype {dtype}: its numbers are longer than float64")


def as_float64(chunk: NDArray[Any]) -> Float64:
    """Return real numbers as float64, exactly unless they have more digits."""
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
    """Return real numbers as float64, and of complex numbers the magnitudes."""
    part = complex_part(chunk.dtype)
    if part is None:
        return as_float64(chunk)
    real, imag = map(as_float64, real_and_imag(chunk))
    if part.itemsize < 8:  # float64 holds the squares; NaN takes precedence over Inf
        size: Float64 = np.sqrt(real * real + imag * imag)
        return size
    return np.where(np.isnan(real) | np.isnan(imag), np.nan, np.hypot(real, imag))


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
