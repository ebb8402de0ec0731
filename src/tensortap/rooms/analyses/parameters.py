"""Analyses of parameters: norms of gradients and weights, updates, and the noise of gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.core.record import Kind
from tensortap.rooms.analyses.analysis import (
    Analysis,
    TrainedParameters,
    joined,
)
from tensortap.rooms.analyses.numbers import Movement, movements, squares

LARGEST = 1 << 30
"""Bytes of the copies of weights."""

_BEYOND = "copies are bounded to {} MiB, and some parameters are beyond: include= selects others"
_NOT_AVERAGED = (
    "left out {} parameters, such as {}: no gradients of micro-batches or ranks were seen"
)


class Norms(Analysis):
    """Gives norms of gradients, as computed and as used, and of weights.

    A gradient is as computed at the end of the last backward pass, and as used when the optimizer
    begins its step: what happens between clips it.
    """

    def begin(self, model: Any) -> None:
        self._computed: dict[str, float] = {}  # sums of squares
        self._used: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._placements: dict[str, str] = {}
        self._copies: dict[str, int] = {}

    def after_backward(self, found: TrainedParameters) -> None:
        self._computed.update(found.gradient_squares)
        self._note(found)

    def before_update(self, found: TrainedParameters) -> None:
        self._used.update(found.gradient_squares)
        self._note(found)

    def _note(self, found: TrainedParameters) -> None:
        self._placements.update((each.name, each.placements) for each in found)
        self._copies.update((each.name, each.copies) for each in found)

    def after_update(self, found: TrainedParameters) -> None:
        # a closure has computed the gradients by now
        self.before_update(TrainedParameters(x for x in found if x.name not in self._used))
        values = {each.name: each.value for each in found}
        self._weights.update(zip(values, squares(list(values.values())), strict=True))

    def end_step(self) -> None:
        for quantity, kind, found in (
            ("grad_norm", Kind.WEIGHT_GRADIENT, self._computed),
            ("grad_norm_used", Kind.WEIGHT_GRADIENT, self._used),
            ("weight_norm", Kind.WEIGHT, self._weights),
        ):
            for name, total in found.items():
                numbers = {quantity: math.sqrt(total)}
                self.give(kind, name, numbers, self._placements.get(name, ""))
            self._give_sums(quantity, found)
            found.clear()
        self._placements.clear()

    def _give_sums(self, quantity: str, found: Mapping[str, float]) -> None:
        if not found:
            return
        sharded = joined(self._placements.get(name, "") for name in found)
        for module, total in sums_of_modules(found).items():
            self.give(Kind.ACTIVATION, module, {quantity: math.sqrt(total)}, sharded)
        total = sum(total / self._copies.get(name, 1) for name, total in found.items())
        self.give_model({quantity: math.sqrt(total)}, sharded)


def sums_of_modules(found: Mapping[str, float]) -> dict[str, float]:
    """Return the sums over the parameters of each module, those of modules in it included."""
    totals: dict[str, float] = {}
    for name, number in found.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            module = ".".join(parts[:depth])
            totals[module] = totals.get(module, 0.0) + number
    return totals


class Updates(Analysis):
    """Gives the norm of each update, and its ratio to the weight, of which there is one copy."""

    def begin(self, model: Any) -> None:
        self._copies: dict[str, NDArray[Any]] = {}
        self._begun: set[str] = set()  # names of which the value before this update is known
        self._totals: dict[str, tuple[float, float]] = {}  # squares of updates and weights
        self._placements: set[str] = set()

    def _memory(self, name: str, like: NDArray[Any]) -> NDArray[Any] | None:
        """Return memory for a copy of an array; None if there is no room."""
        known = self._copies.get(name)
        if known is None or known.shape != like.shape or known.dtype != like.dtype:
            others = sum(copy.nbytes for key, copy in self._copies.items() if key != name)
            if others + like.nbytes > LARGEST:
                self.unseen["updates"] = _BEYOND.format(LARGEST >> 20)
                return None
            known = self._copies[name] = np.empty(like.shape, like.dtype)
        return known

    def before_update(self, found: TrainedParameters) -> None:
        moves = []
        self._begun.clear()
        for each in found:
            copy = self._memory(each.name, each.value)
            if copy is not None:
                moves.append(Movement(each.value, keep=copy))
                self._begun.add(each.name)
        movements(moves)  # copies with several threads

    def after_update(self, found: TrainedParameters) -> None:
        known = [each for each in found if each.name in self._begun]
        moves = [Movement(each.value, self._copies[each.name]) for each in known]
        for each, sums in zip(known, movements(moves), strict=True):
            self.give(Kind.WEIGHT, each.name, _sizes(sums.moved, sums.squares), each.placements)
            self._totals[each.name] = sums.moved / each.copies, sums.squares / each.copies
            self._placements.add(each.placements)

    def end_step(self) -> None:
        if self._totals:
            totals = (sum(column) for column in zip(*self._totals.values(), strict=True))
            self.give_model(_sizes(*totals), joined(self._placements))
        self._totals.clear()
        self._placements.clear()


def _sizes(moved: float, squares: float) -> dict[str, float]:
    """Return the norm of an update, and the logarithm of its ratio to the weight."""
    sizes = {"update_norm": math.sqrt(moved)}
    if moved > 0 and squares > 0:
        sizes["update_ratio"] = 0.5 * math.log10(moved / squares)
    return sizes


class NoiseEstimate(NamedTuple):
    """Unbiased estimates of the square of the true gradient, and of the noise of one sample."""

    signal: float
    noise: float


def estimate(one: float, mean: float, samples: int) -> NoiseEstimate:
    """Return estimates from the mean square of single gradients and the square of their mean."""
    return NoiseEstimate(
        (samples * mean - one) / (samples - 1), (one - mean) / (1.0 - 1.0 / samples)
    )


class GradientNoise(Analysis):
    """Gives the noise scale of the model, and the signal-to-noise ratio of each parameter.

    The gradients of micro-batches, or of replicas, are samples of the same gradient. How much
    smaller the square of their mean is than the mean of their squares tells signal from noise: see
    appendix A of McCandlish et al., An Empirical Model of Large-Batch Training (2018).
    """

    def begin(self, model: Any) -> None:
        self._single: dict[str, float] = {}  # squares of the gradients of samples, added up
        self._total: Mapping[str, float] = {}  # squares of their sum
        self._new: list[str] = []  # names that had no gradient before this pass
        self._passes = 0
        self._averages: dict[str, NoiseEstimate] = {}
        self._placements: dict[str, str] = {}

    def gradient(self, name: str, gradient: NDArray[Any] | None) -> None:
        if gradient is None:
            self._new.append(name)
        else:
            self._single[name] = self._single.get(name, 0.0) + squares([gradient])[0]

    def after_backward(self, found: TrainedParameters) -> None:
        self._passes += 1
        self._total = found.gradient_squares
        self._placements = {each.name: each.placements for each in found}
        for name in self._new:
            if name in self._total:
                self._single[name] = self._single.get(name, 0.0) + self._total[name]
        self._new.clear()

    def end_step(self) -> None:
        passes, samples = self._passes, self._passes * self.replicas
        if samples > 1:
            found = {
                name: estimate(self._single[name] / passes, total / passes**2, samples)
                for name, total in self._total.items()
                if name in self._single
            }
            for name, each in found.items():
                average = self._average(name, each)
                if average.noise > 0:
                    numbers = {"grad_snr": average.signal / average.noise}
                    self.give(Kind.WEIGHT_GRADIENT, name, numbers, self._placements[name])
            if found:
                total = NoiseEstimate(*map(sum, zip(*found.values(), strict=True)))
                average = self._average("", total)
                numbers = {"grad_signal": total.signal, "grad_noise": total.noise}
                if average.signal > 0:
                    numbers["noise_scale"] = average.noise / average.signal
                self.give_model(numbers, joined(self._placements[name] for name in found))
            missing = [name for name, total in self._total.items() if total and name not in found]
            if missing:
                self.unseen["noise"] = _NOT_AVERAGED.format(len(missing), missing[0])
        self._single.clear()
        self._new.clear()
        self._total, self._passes = {}, 0

    def _average(self, name: str, new: NoiseEstimate) -> NoiseEstimate:
        """Return averages over steps, in which later ones count more."""
        last = self._averages.get(name, new)
        average = NoiseEstimate(*(0.9 * a + 0.1 * b for a, b in zip(last, new, strict=True)))
        self._averages[name] = average
        return average
