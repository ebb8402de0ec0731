"""The summary of an array in memory, computed by NumPy alone: the plain twin of the kernel.

Chunks that fit into the cache are converted to float64 and summarized, then merged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.core.record import Summary
from tensortap.stats.conversion import as_real, check_numeric
from tensortap.stats.merge import Moments, merge, summary_of

_CHUNK = 1 << 15  # elements: as float64, a few such arrays fit into a usual L2 cache


def summarize_array(array: NDArray[Any]) -> Summary:
    """Return the statistics of an array, like `tensortap.stats.summarize_array`."""
    array = np.asarray(array)
    check_numeric(array.dtype)
    # nan, overflow and underflow are expected here, whatever the user's np.seterr says
    with np.errstate(all="ignore"):
        return merge(*map(_summary, _chunks(array)))


def _summary(chunk: NDArray[Any]) -> Summary:
    x = as_real(chunk)
    finite = np.isfinite(x)
    bits = _magnitudes(chunk, x)[finite].view(np.uint64)
    exponents, numbers = np.unique(_exponents(bits[bits != 0]), return_counts=True)
    others = (bits == 0, np.isnan(x), x == np.inf, x == -np.inf)
    return summary_of(
        _moments(x[finite]),
        [x.size, *(int(np.count_nonzero(each)) for each in others)],
        dict(zip(exponents.tolist(), numbers.tolist(), strict=True)),
    )


def _chunks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield all elements in one-dimensional, contiguous chunks of native byte order.

    A chunk is valid only until the next one is requested.
    """
    if not array.size:
        yield array.ravel()
        return
    chunks = np.nditer(  # type: ignore[call-overload]  # NumPy's stub spells it "config"
        np.atleast_1d(array),
        flags=["external_loop", "buffered"],
        op_flags=[["readonly", "contig"]],
        order="K",
        buffersize=_CHUNK,
    )
    for chunk in chunks:
        yield chunk.astype(array.dtype.newbyteorder("="), copy=False)


def _magnitudes(chunk: NDArray[Any], x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the magnitudes of `x`, rounded down: their exponents are those of the chunk."""
    if chunk.dtype.kind not in "iu" or chunk.dtype.itemsize < 8:
        return np.abs(x)
    # as uint64, the absolute value of -2**63 is right again
    size = np.abs(chunk).view(np.uint64)
    # float64 holds 53 bits: without the last 11, nothing is rounded up
    kept = np.where(size >> np.uint64(53), size & ~np.uint64(0x7FF), size)
    return np.asarray(kept, np.float64)


def _exponents(bits: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the exponents of positive numbers, given their bits.

    A comparison takes subnormal numbers for zeros if the processor flushes them.
    """
    fields = (bits >> np.uint64(52)).astype(np.int64)
    of_subnormal = np.frexp(bits.astype(np.float64))[1] - 1075
    return np.where(fields > 0, fields - 1023, of_subnormal)


def _moments(x: NDArray[np.float64]) -> Moments:
    """Return the moments of finite numbers."""
    if not x.size:
        return Moments(*[0] * 11)
    low, high = float(x.min()), float(x.max())
    exponent = math.frexp(max(-low, high))[1]
    y = np.ldexp(x, -exponent)
    squares = y * y
    fourth = squares * squares
    mean = float(y.mean())
    # correct both for the rounding error of the mean, for small deviations
    away = y - mean
    rest = float(away.mean())
    m2 = max(0.0, x.size * (float((away * away).mean()) - rest * rest))
    return Moments(
        x.size,
        exponent,
        mean + rest,
        m2,
        mean_abs=float(np.abs(y).mean()),
        p2=float(squares.mean()),
        p4=float(fourth.mean()),
        p8=float((fourth * fourth).mean()),
        low=low,
        high=high,
        min_abs=float(np.abs(x).min()),
    )
