"""Losses of tensors in block formats: small floats that share one scale per block of values.

The MX formats have blocks of 32 values and a scale that is a power of two, chosen by the exponent
of the largest magnitude (the floor rule of the OCP specification). NVFP4 has blocks of 16, a
`float8_e4m3fn` scale for each, and a float32 scale for the whole tensor. Values are rounded to
nearest, ties to even, and clamped to the largest number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.core.arguments import checked
from tensortap.core.dtypes import DTYPES
from tensortap.core.errors import NotFound
from tensortap.rooms.formats.losses import limits
from tensortap.stats.conversion import as_float64, check_numeric, complex_part
from tensortap.stats.summarize import kernel
from tensortap.values.view import array_of

Float32 = NDArray[np.float32]
Reals = NDArray[np.float64]
Counts = NDArray[np.uint32]

BLOCK_FORMATS = {
    "mxfp8_e4m3": "float8_e4m3fn",
    "mxfp8_e5m2": "float8_e5m2",
    "mxfp6_e2m3": "float6_e2m3fn",
    "mxfp6_e3m2": "float6_e3m2fn",
    "mxfp4": "float4_e2m1fn",
    "nvfp4": "float4_e2m1fn",
}
"""Block format → the dtype of its elements."""

_MAX_BLOCK = 4096  # as in the kernel


class _Rounding(NamedTuple):
    """A format as the kernel takes it: see BlockFormat in kernel/variants.h."""

    digits: int  # 0: the scale is a power of two
    least: int
    largest: float
    over: float


@dataclass(frozen=True, slots=True)
class QuantizeError:
    """Losses of a tensor in a block format, by block and as a whole.

    The arrays have the shape of the tensor, with blocks instead of values along `axis`.
    `underflow` counts the nonzero values of a block that become zero, `saturated` the finite ones
    that are clamped, `sqnr` is the signal-to-quantization-noise ratio in decibels: inf without any
    error, nan without any signal. `values` is what the tensor becomes, in float32.
    """

    format: str
    block: int
    axis: int
    values: Float32
    scale: Float32
    underflow: Counts
    saturated: Counts
    signal: Reals
    noise: Reals

    @property
    def sqnr(self) -> Reals:
        """Signal-to-quantization-noise ratio of each block, in decibels."""
        ratios: Reals = _decibels(self.signal, self.noise)
        return ratios

    @property
    def worst(self) -> tuple[int, ...] | None:
        """Index of the block with the lowest ratio; None if no block has a signal."""
        ratios = self.sqnr
        if np.isnan(ratios).all():
            return None
        return tuple(int(i) for i in np.unravel_index(np.nanargmin(ratios), ratios.shape))

    def totals(self) -> dict[str, float]:
        """Return the shares of all values that underflow and saturate, and the ratios."""
        ratios, count = self.sqnr, max(self.values.size, 1)
        worst = self.worst
        return {
            "underflow": int(self.underflow.sum()) / count,
            "saturated": int(self.saturated.sum()) / count,
            "sqnr": float(_decibels(self.signal.sum(), self.noise.sum())),
            "worst_sqnr": math.nan if worst is None else float(ratios[worst]),
            "nan_blocks": int(np.isnan(self.scale).sum()),
        }


@checked
def quantize_error(
    x: Any,
    format: str,  # noqa: A002
    *,
    block: int | None = None,
    axis: int = -1,
) -> QuantizeError:
    """Return what a tensor loses in a block format, such as ``"mxfp8_e4m3"`` or ``"nvfp4"``.

    `block` is the number of values that share a scale, by default that of the format, along `axis`;
    the last block may be shorter. A block with a NaN becomes NaN. Float64 is rounded to float32
    first.

    >>> found = quantize_error([[1.0, 0.1, 1e-4, 6.0] * 8], "mxfp4")
    >>> found.totals()["underflow"], found.values[0, :4].tolist()
    (0.5, [1.0, 0.0, 0.0, 6.0])
    """
    array = array_of(x)
    array = np.atleast_1d(np.asarray(x) if array is None else array)
    if format not in BLOCK_FORMATS:
        known = ", ".join(BLOCK_FORMATS)
        raise NotFound(f"no block format is called {format!r}; there are {known}")
    if block is None:
        block = 16 if format == "nvfp4" else 32
    elif not 1 <= block <= _MAX_BLOCK:
        raise ValueError(f"block must be from 1 to {_MAX_BLOCK}, got {block!r}")
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(f"axis must be one of the {array.ndim} axes of the tensor, got {axis}")
    moved = np.ascontiguousarray(np.moveaxis(_as_float32(array), axis, -1))
    columns = _Columns.for_blocks((*moved.shape[:-1], -(-moved.shape[-1] // block)))
    values = np.empty_like(moved)
    if moved.size:
        rules = _Rules.of(format, block, moved)
        quantize = _quantize_in_numpy if kernel is None else _quantize_in_kernel
        quantize(moved, rules, values, columns)
    back: list[Any] = [np.moveaxis(each, -1, axis) for each in (values, *columns)]
    return QuantizeError(format, block, axis % array.ndim, *back)


class _Columns(NamedTuple):
    """Columns with one element per block."""

    scale: Float32
    underflow: Counts
    saturated: Counts
    signal: Reals
    noise: Reals

    @classmethod
    def for_blocks(cls, shape: tuple[int, ...]) -> _Columns:
        dtypes = (np.float32, np.uint32, np.uint32, np.float64, np.float64)
        return cls(*(np.zeros(shape, dtype) for dtype in dtypes))


class _Rules(NamedTuple):
    """Rules of quantization; the fields of BlockRules in kernel/kernel.h."""

    formats: tuple[_Rounding, _Rounding]  # of elements and of scales
    block: int
    top: int
    least: float
    whole: float

    @classmethod
    def of(cls, format: str, block: int, values: Float32) -> _Rules:  # noqa: A002
        element = _rounding(BLOCK_FORMATS[format])
        top = limits(BLOCK_FORMATS[format]).top
        if format != "nvfp4":
            return cls((element, _Rounding(0, 0, 0.0, 0.0)), block, top, 0.0, 1.0)
        scale = _rounding("float8_e4m3fn")
        largest = max(values.max(), -values.min())
        if not np.isfinite(largest):
            sizes = np.abs(values)
            largest = sizes.max(initial=0.0, where=np.isfinite(sizes))
        whole = np.float32(largest) / np.float32(scale.largest * element.largest)
        # the least scale of a block is the smallest normal number
        return cls((element, scale), block, top, 2.0**-6, float(whole) or 1.0)


def _rounding(dtype: str) -> _Rounding:
    row, edges = DTYPES[dtype].format, limits(dtype)
    assert row is not None
    over = np.float32(edges.over)
    if not edges.over_is_lost:
        over = np.nextafter(over, np.float32(np.inf))
    least = int(np.array(2.0**row.least_exponent, np.float32).view(np.uint32))
    return _Rounding(row.digits, least, row.largest, float(over))


def _as_float32(array: NDArray[Any]) -> Float32:
    check_numeric(array.dtype)
    if complex_part(array.dtype) is not None:
        raise TypeError("block formats hold real numbers, got complex ones")
    if array.dtype == np.float32:
        return array
    with np.errstate(over="ignore"):
        return as_float64(array).astype(np.float32)


def _quantize_in_kernel(values: Float32, rules: _Rules, made: Float32, columns: _Columns) -> None:
    addresses = tuple(each.ctypes.data for each in columns)
    length = values.shape[-1]
    rows = values.size // length
    kernel.quantize(values.ctypes.data, rows, length, *rules, made.ctypes.data, addresses)


def _quantize_in_numpy(values: Float32, rules: _Rules, made: Float32, columns: _Columns) -> None:
    element, scales = rules.formats
    length = values.shape[-1]
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -length % rules.block)]
    x = np.pad(values, padding).reshape(*columns.scale.shape, rules.block)
    largest = np.abs(x).max(axis=-1)
    with np.errstate(all="ignore"):
        if scales.digits == 0:
            exponents = (largest.view(np.int32) >> 23) - rules.top
            scale = (np.maximum(exponents, 1) << 23).view(np.float32)
            inverse = 1 / scale
        else:
            whole = np.float32(rules.whole)
            share = largest / np.float32(element.largest) / whole
            share = _rounded(np.maximum(share, np.float32(rules.least)), scales)
            inverse, scale = 1 / whole / share, share * whole
        size = np.abs(x) * inverse[..., None]
        rounded = _rounded(size, element)
        y = np.copysign(rounded, x) * scale[..., None]
        finite, lost = np.isfinite(x), np.isnan(largest)
        y[lost] = np.nan
        exact = np.where(finite, x, 0).astype(np.float64)
        error = np.where(finite, y - exact, 0.0)
    columns.scale[...] = np.where(lost, np.float32(np.nan), scale)
    columns.underflow[~lost] = ((rounded == 0) & (x != 0)).sum(axis=-1)[~lost]
    columns.saturated[~lost] = ((size >= np.float32(element.over)) & finite).sum(axis=-1)[~lost]
    columns.signal[~lost] = (exact**2).sum(axis=-1)[~lost]
    columns.noise[~lost] = (error**2).sum(axis=-1)[~lost]
    made[...] = y.reshape(*values.shape[:-1], -1)[..., :length]


def _rounded(size: Float32, to: _Rounding) -> Float32:
    size = np.minimum(size, np.float32(to.largest))
    exponents = np.maximum(size.view(np.int32) & 0x7F800000, to.least)
    half = (exponents + ((24 - to.digits) << 23)).astype(np.int32).view(np.float32)
    rounded: Float32 = (size + half) - half
    return rounded


def _decibels(signal: Any, noise: Any) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return 10 * np.log10(np.divide(signal, noise))
