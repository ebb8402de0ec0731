"""Norms of gradients and weights: per parameter, per module and of the whole model."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tensortap.core.record import Kind
from tensortap.rooms.health.analyses.analysis import Analysis, Copies, Give, beyond
from tensortap.rooms.health.analyses.norms_stats import Movement, movements, squares
from tensortap.rooms.health.analyzing import TrainedParameters


class Norms(Analysis):
    """Gives norms of gradients, as computed and as used, of weights, and angles of gradients.

    A gradient is as computed at the end of the last backward pass, and as used when the optimizer
    begins its step: what happens between clips it.
    """

    def __init__(self, give: Give, unseen: dict[str, str]) -> None:
        super().__init__(give, unseen)
        self._copies = Copies()
        self._computed: dict[str, float] = {}  # sums of squares
        self._used: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._placements: dict[str, str] = {}

    def detach(self) -> None:
        super().detach()
        self._copies.clear()

    def after_backward(self, found: TrainedParameters) -> None:
        self._computed.update(found.gradient_squares)
        self._placements.update((each.name, each.placements) for each in found)

    def before_update(self, found: TrainedParameters) -> None:
        names, moves = [], []
        for each in found:
            self._placements[each.name] = each.placements
            if each.gradient is not None:
                copies, known = self._copies.of(each.name, each.gradient)
                kept = None if copies is None else copies[0]
                if kept is None:
                    self.unseen["gradient cosines"] = beyond()
                names.append(each.name)
                moves.append(Movement(each.gradient, None, kept if known else None, None, kept))
        for name, sums in zip(names, movements(moves), strict=True):
            self._used[name] = sums.squares
            if sums.cosine is not None:
                numbers = {"grad_cosine": sums.cosine}
                self.give(Kind.WEIGHT_GRADIENT, name, numbers, self._placements[name])

    def after_update(self, found: TrainedParameters) -> None:
        missing = TrainedParameters(each for each in found if each.name not in self._used)
        self.before_update(missing)  # a closure has computed the gradients by now
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
        """Give the norms of modules, and of the model."""
        if not found:
            return
        sharded = " ".join(sorted({self._placements.get(name, "") for name in found} - {""}))
        for module, total in sums_of_modules(found).items():
            self.give(Kind.ACTIVATION, module, {quantity: math.sqrt(total)}, sharded)
        self.give_model({quantity: math.sqrt(sum(found.values()))}, sharded)


def sums_of_modules(found: Mapping[str, float]) -> dict[str, float]:
    """Return the sums over the parameters of each module, those of modules in it included.

    >>> sums_of_modules({"a.0.weight": 2.0, "a.0.bias": 1.0, "a.1.weight": 4.0, "scale": 3.0})
    {'a': 7.0, 'a.0': 3.0, 'a.1': 4.0}
    """
    totals: dict[str, float] = {}
    for name, number in found.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            module = ".".join(parts[:depth])
            totals[module] = totals.get(module, 0.0) + number
    return totals
