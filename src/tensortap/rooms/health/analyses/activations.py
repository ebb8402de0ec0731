"""The family ``activations``: outliers, dead channels and the rank of what layers return."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.core.record import Kind
from tensortap.rooms.health.analyses.activations_stats import (
    LayerMoments,
    effective_rank,
    layer_moments,
    outlier_ratios,
)
from tensortap.rooms.health.analyses.analysis import Analysis, Give
from tensortap.rooms.health.analyzing import ModuleOutput, OutputArray

OUTLIER = 6.0
"""An outlier channel is so many times as large as the median channel."""

WINDOW = 10
"""Observed steps over which channels must be 0 to be dead, and over which outliers persist."""

_NAMED = 3  # outlier channels that are named, the largest first


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
        numbers: dict[str, float] = {
            "zero_channels": int(zero.sum()),
            "dead_channels": int((self.zero_steps >= WINDOW).sum()),
            "outlier_channels": len(found),
        }
        # one is enough in most steps, and sorting takes longer
        largest = np.array([ratios.argmax()])
        if len(found) > 1:
            largest = np.argsort(-ratios, kind="stable")[: min(len(found), _NAMED)]
        for i, channel in enumerate(largest.tolist()):
            suffix = f"_{i + 1}" if i else ""
            times = sum(channel in each for each in self.outliers)
            numbers[f"outlier_channel{suffix}"] = channel
            numbers[f"outlier_ratio{suffix}"] = float(ratios[channel])
            numbers[f"outlier_persistence{suffix}"] = times / len(self.outliers)
        return numbers


class Activations(Analysis):
    """Kurtosis, outlier channels, dead channels and effective rank of the outputs of modules.

    They are about the first call of a module in a step; channels are dead if they are 0 in all.
    """

    def __init__(self, give: Give, unseen: dict[str, str]) -> None:
        super().__init__(give, unseen)
        self._histories: dict[str, ChannelHistory] = {}
        self._moments: dict[str, LayerMoments] = {}  # of the first call in this step
        self._zero: dict[str, NDArray[np.bool_]] = {}
        self._ranks: dict[str, float] = {}

    def detach(self) -> None:
        super().detach()
        self._histories.clear()
        self._forget_step()

    def _forget_step(self) -> None:
        self._moments.clear()
        self._zero.clear()
        self._ranks.clear()

    def output(self, seen: ModuleOutput) -> None:
        for each in seen.arrays:
            if each.array.ndim >= 2 and each.array.size and each.array.dtype.kind not in "biucO":
                self._take(each, first=seen.call == 0)

    def _take(self, seen: OutputArray, first: bool) -> None:
        if first and seen.same_as in self._moments:
            self._moments[seen.name] = self._moments[seen.same_as]
            self._ranks[seen.name] = self._ranks[seen.same_as]
            self._zero[seen.name] = self._zero[seen.same_as]
            return
        matrix = _matrix(seen.array, seen.channels)
        if first:
            found = self._moments[seen.name] = layer_moments(matrix)
            self._ranks[seen.name] = effective_rank(matrix)
            self._zero[seen.name] = found.dead
        elif seen.name in self._zero and len(self._zero[seen.name]) == matrix.shape[1]:
            zero = self._zero[seen.name].copy()
            if zero.any():
                zero[zero] = ~matrix[:, zero].any(axis=0)
            self._zero[seen.name] = zero

    def end_step(self) -> None:
        for name, moments in self._moments.items():
            history = self._histories.get(name)
            if history is None or len(history.zero_steps) != len(moments.rms):
                history = self._histories[name] = ChannelHistory(len(moments.rms))
            numbers = {"kurtosis": moments.kurtosis, "effective_rank": self._ranks[name]}
            numbers |= history.end_step(self._zero[name], outlier_ratios(moments.rms))
            self.give(Kind.ACTIVATION, name, numbers)
        self._forget_step()


def _matrix(array: NDArray[Any], channels: int) -> NDArray[Any]:
    """Return an array as a matrix with one column per channel, without a copy where possible.

    >>> _matrix(np.zeros((2, 3, 4, 5)), 1).shape
    (40, 3)
    """
    moved = np.moveaxis(array, channels, -1)
    return moved.reshape(-1, moved.shape[-1])
