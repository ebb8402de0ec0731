"""The family ``activations``: outliers, dead channels and the rank of what layers return.

The output of a layer is a matrix whose rows are samples and whose columns are channels.
"""

from __future__ import annotations

import collections
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.core.record import Kind
from tensortap.rooms.analyses.analysis import (
    Analysis,
    ModuleOutput,
    OutputArray,
)
from tensortap.rooms.analyses.numbers import Reals, evenly_spaced
from tensortap.stats.conversion import as_float64
from tensortap.stats.summarize import kernel, kernel_code

_KERNEL_FLOATS = ("float32", "float64", "float16", "bfloat16")

OUTLIER = 6.0
"""An outlier channel is so many times as large as the median channel."""

WINDOW = 10
"""Observed steps over which channels must be 0 to be dead, and over which outliers persist."""


class ChannelHistory:
    """A history of the channels of one tensor over the last observed steps."""

    def __init__(self, channels: int) -> None:
        self.zero_steps = np.zeros(channels, np.int64)  # in a row, up to now
        self.outliers: collections.deque[NDArray[np.int64]] = collections.deque(maxlen=WINDOW)

    def end_step(self, zero: NDArray[np.bool_], ratios: NDArray[np.float64]) -> dict[str, float]:
        """Add a step, and return the numbers about it."""
        self.zero_steps = np.where(zero, self.zero_steps + 1, 0)
        found = np.flatnonzero(ratios >= OUTLIER)
        self.outliers.append(found)
        largest = int(ratios.argmax())
        times = sum(largest in each for each in self.outliers)
        return {
            "zero_channels": int(zero.sum()),
            "dead_channels": int((self.zero_steps >= WINDOW).sum()),
            "outlier_channels": len(found),
            "outlier_channel": largest,
            "outlier_ratio": float(ratios[largest]),
            "outlier_persistence": times / len(self.outliers),
        }


class Activations(Analysis):
    """Kurtosis, outlier channels, dead channels and effective rank of the outputs of modules.

    They are about the first call of a module in a step; channels are dead if they are 0 in all.
    """

    def begin(self, model: Any) -> None:
        self._histories: dict[str, ChannelHistory] = {}
        # of the first call in this step; but `dead` is that of all calls
        self._moments: dict[str, LayerMoments] = {}
        self._ranks: dict[str, float] = {}

    def output(self, seen: ModuleOutput) -> None:
        for each in seen.arrays:
            if each.array.ndim >= 2 and each.array.size and each.array.dtype.kind not in "biucO":
                self._take(each, first=seen.call == 0)

    def _take(self, seen: OutputArray, first: bool) -> None:
        if first and seen.same_as in self._moments:
            self._moments[seen.name] = self._moments[seen.same_as]
            self._ranks[seen.name] = self._ranks[seen.same_as]
            return
        matrix = _matrix(seen.array, seen.channels)
        if first:
            self._moments[seen.name] = layer_moments(matrix)
            self._ranks[seen.name] = effective_rank(matrix)
        elif (known := self._moments.get(seen.name)) and len(known.dead) == matrix.shape[1]:
            self._moments[seen.name] = known._replace(dead=_still_zero(matrix, known.dead))

    def end_step(self) -> None:
        for name, moments in self._moments.items():
            history = self._histories.get(name)
            if history is None or len(history.zero_steps) != len(moments.rms):
                history = self._histories[name] = ChannelHistory(len(moments.rms))
            numbers = {"kurtosis": moments.kurtosis, "effective_rank": self._ranks[name]}
            numbers |= history.end_step(moments.dead, outlier_ratios(moments.rms))
            self.give(Kind.ACTIVATION, name, numbers)
        self._moments.clear()
        self._ranks.clear()


def _still_zero(matrix: NDArray[Any], zero: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which of some channels are 0 in all rows of a matrix; NaN is not 0."""
    found = zero.copy()
    if found.any():
        found[zero] = ~matrix[:, zero].any(axis=0)
    return found


def _matrix(array: NDArray[Any], channels: int) -> NDArray[Any]:
    """Return an array as a matrix with one column per channel, without a copy where possible."""
    moved = np.moveaxis(array, channels, -1)
    return moved.reshape(-1, moved.shape[-1])


# -- numbers about a matrix ------------------------------------------------------------------


class LayerMoments(NamedTuple):
    """The kurtosis of all finite elements, and per channel: root mean square, and whether all 0."""

    kurtosis: float
    rms: Reals
    dead: NDArray[np.bool_]


def layer_moments(matrix: NDArray[Any]) -> LayerMoments:
    """Return the moments of a matrix of floats; a normal distribution has a kurtosis of 3."""
    channels = matrix.shape[1]
    code = kernel_code(matrix.dtype) if matrix.dtype.name in _KERNEL_FLOATS else None
    if not matrix.size:
        return LayerMoments(math.nan, np.zeros(channels), np.zeros(channels, np.bool_))
    found = None
    if code is not None and matrix.strides[1] == matrix.itemsize:
        found = _by_kernel(matrix, code)
    kurtosis, rms = _by_numpy(matrix) if found is None else found
    return LayerMoments(kurtosis, rms, _still_zero(matrix, rms == 0))  # squares may underflow


def _by_kernel(matrix: NDArray[Any], code: int) -> tuple[float, Reals] | None:
    """Return kurtosis and root mean squares; None if a sum is not finite."""
    rows, channels = matrix.shape
    address = matrix.__array_interface__["data"][0]
    picked = matrix[:: max(rows // 8, 1), :: max(channels // 256, 1)]
    with np.errstate(all="ignore"):
        shift = float(as_float64(np.ascontiguousarray(picked)).mean())
    for _ in range(3):
        if not math.isfinite(shift):
            return None
        squares = np.zeros(channels)
        p1, p2, p3, p4 = kernel.channels(
            address, code, matrix.shape, matrix.strides, shift, squares.ctypes.data
        )
        if not (math.isfinite(p4) and math.isfinite(float(squares.sum()))):
            return None
        n = matrix.size
        delta, m2, m3, m4 = p1 / n, p2 / n, p3 / n, p4 / n
        variance = m2 - delta * delta
        if delta * delta <= 0.01 * variance:  # near enough to the mean to cost no digits
            fourth = m4 - 4 * delta * m3 + 6 * delta * delta * m2 - 3 * delta**4
            return _ratio(fourth, variance, shift + delta), np.sqrt(squares / rows)
        shift += delta
    return None


def _ratio(fourth: float, variance: float, mean: float) -> float:
    """Return the kurtosis; nan if all values are equal, up to rounding."""
    return fourth / variance**2 if variance > 1e-28 * mean * mean else math.nan


def _by_numpy(matrix: NDArray[Any]) -> tuple[float, Reals]:
    values = as_float64(np.ascontiguousarray(matrix))
    finite = np.isfinite(values)
    values = np.where(finite, values, 0.0)
    count, of_channel = finite.sum(), np.maximum(finite.sum(axis=0), 1)
    with np.errstate(all="ignore"):
        mean = values.sum() / count
        d2 = np.where(finite, values - mean, 0.0) ** 2
        kurtosis = _ratio(float((d2 * d2).sum() / count), float(d2.sum() / count), float(mean))
        rms: Reals = np.sqrt((values * values).sum(axis=0) / of_channel)
    return kurtosis, rms


def outlier_ratios(rms: Reals) -> Reals:
    """Return the size of each channel relative to the median of all channels that are not 0."""
    alive = np.sort(rms[rms > 0])
    if not len(alive):
        return np.zeros_like(rms)
    middle = alive[(len(alive) - 1) // 2 : len(alive) // 2 + 1]  # np.median imports a lot
    return rms / float(middle.mean())


def effective_rank(matrix: NDArray[Any]) -> float:
    """Return the exponential of the entropy of the singular values of at most 32 rows.

    It is 1 if all rows point in one direction, and at most the number of rows or columns. It is
    nan if a value is not finite, and 0 if all are 0.
    """
    sample = as_float64(np.ascontiguousarray(matrix[evenly_spaced(len(matrix), 32)]))
    if not np.isfinite(sample).all():
        return math.nan
    sizes = _singular_values(sample)
    total = sizes.sum()
    if not total:
        return 0.0
    share = sizes[sizes > 0] / total
    return math.exp(-float((share * np.log(share)).sum()))


def _singular_values(matrix: Reals) -> Reals:
    """Return the singular values: roots of eigenvalues if that is exact, else the slow way.

    That is after a QR decomposition, which keeps the singular values.
    """
    if matrix.shape[0] > matrix.shape[1]:
        matrix = matrix.T
    squares: Any = np.linalg.eigvalsh(matrix @ matrix.T)
    if squares[0] > 1e-4 * squares[-1]:
        return np.asarray(np.sqrt(squares), np.float64)
    triangle: Any = np.linalg.qr(matrix.T, mode="r")
    return np.asarray(np.linalg.svd(triangle, compute_uv=False), np.float64)
