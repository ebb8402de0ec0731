"""The noise of gradients: what a batch of another size would have to say.

The gradients of micro-batches, or of replicas, are samples of the same gradient. How much smaller
the square of their mean is than the mean of their squares tells signal from noise: see appendix A
of McCandlish et al., An Empirical Model of Large-Batch Training (2018).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from numpy.typing import NDArray

from tensortap.core.record import Kind
from tensortap.rooms.health.analyses.analysis import Analysis, Give
from tensortap.rooms.health.analyses.norms_stats import squares
from tensortap.rooms.health.analyzing import TrainedParameters

_DECAY = 0.9  # of averages over observed steps
_NOT_AVERAGED = (
    "left out {} parameters, such as {}: no gradients of micro-batches or ranks were seen"
)


class NoiseEstimate(NamedTuple):
    """Unbiased estimates of the square of the true gradient, and of the noise of one sample."""

    signal: float
    noise: float


def estimate(one: float, mean: float, samples: int) -> NoiseEstimate:
    """Return the estimates from the mean square of single gradients, and the square of their mean.

    >>> estimate(5.0, 2.0, 4)
    NoiseEstimate(signal=1.0, noise=4.0)
    """
    return NoiseEstimate(
        (samples * mean - one) / (samples - 1), (one - mean) / (1.0 - 1.0 / samples)
    )


class GradientNoise(Analysis):
    """Gives the noise scale of the model, and the signal-to-noise ratio of each parameter."""

    def __init__(self, give: Give, unseen: dict[str, str]) -> None:
        super().__init__(give, unseen)
        self._single: dict[str, float] = {}  # squares of the gradients of samples, added up
        self._total: Mapping[str, float] = {}  # squares of their sum
        self._new: list[str] = []  # names that had no gradient before this pass
        self._passes = 0
        self._averages: dict[str, NoiseEstimate] = {}
        self._placements: dict[str, str] = {}

    def detach(self) -> None:
        super().detach()
        self._averages.clear()

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
        passes, samples = self._passes, self._passes * self.facts.replicas
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
                sharded = " ".join(sorted({self._placements[name] for name in found} - {""}))
                total = NoiseEstimate(*map(sum, zip(*found.values(), strict=True)))
                self._give_model(total, sharded)
            missing = [name for name, total in self._total.items() if total and name not in found]
            if missing:
                self.unseen["noise"] = _NOT_AVERAGED.format(len(missing), missing[0])
        self._single.clear()
        self._new.clear()
        self._total, self._passes = {}, 0

    def _give_model(self, total: NoiseEstimate, placements: str) -> None:
        average = self._average("", total)
        numbers = {"grad_signal": total.signal, "grad_noise": total.noise}
        if average.signal > 0:
            numbers["noise_scale"] = average.noise / average.signal
        self.give_model(numbers, placements)

    def _average(self, name: str, new: NoiseEstimate) -> NoiseEstimate:
        """Return averages over steps, in which later ones count more."""
        last = self._averages.get(name, new)
        average = NoiseEstimate(
            *(_DECAY * a + (1 - _DECAY) * b for a, b in zip(last, new, strict=True))
        )
        self._averages[name] = average
        return average
