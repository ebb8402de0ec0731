"""Updates: how far the optimizer moves each weight, and whether in the direction of last time."""

from __future__ import annotations

import math

from tensortap.core.record import Kind
from tensortap.rooms.health.analyses.analysis import Analysis, Copies, Give, beyond
from tensortap.rooms.health.analyses.norms_stats import Movement, movements
from tensortap.rooms.health.analyzing import TrainedParameters


class Updates(Analysis):
    """Gives the norm of each update, its ratio to the weight, and its angle to the previous one.

    There are three copies of each weight: two that take turns as the value before this update and
    before the previous one, and one after the previous one.
    """

    def __init__(self, give: Give, unseen: dict[str, str]) -> None:
        super().__init__(give, unseen)
        self._copies = Copies(times=3)
        self._updates: dict[str, int] = {}  # per name, since its copies were made
        self._begun: set[str] = set()  # names of which the value before this update is known
        self._totals: dict[str, tuple[float, float]] = {}  # squares of updates and weights
        self._sharded: set[str] = set()

    def detach(self) -> None:
        super().detach()
        self._copies.clear()
        self._updates.clear()

    def before_update(self, found: TrainedParameters) -> None:
        moves = []
        self._begun.clear()
        for each in found:
            copies, known = self._copies.of(each.name, each.value)
            if copies is None:
                continue
            number = self._updates[each.name] = self._updates.get(each.name, 0) if known else 0
            moves.append(Movement(each.value, keep=copies[number % 2]))
            self._begun.add(each.name)
        movements(moves)  # copies with several threads

    def after_update(self, found: TrainedParameters) -> None:
        chosen, moves = [], []
        for each in found:
            copies, known = self._copies.of(each.name, each.value)
            if copies is None:
                self.unseen["updates"] = beyond()
            if copies is None or not known or each.name not in self._begun:
                continue
            number = self._updates[each.name]
            self._updates[each.name] = number + 1
            move = Movement(each.value, copies[number % 2], keep=copies[2])
            if number:
                move = move._replace(previous_new=copies[2], previous_old=copies[(number + 1) % 2])
            chosen.append(each)
            moves.append(move)
        for each, sums in zip(chosen, movements(moves), strict=True):
            cosine = {} if sums.cosine is None else {"update_cosine": sums.cosine}
            sizes = _sizes(sums.moved, sums.squares)
            self.give(Kind.WEIGHT, each.name, {**sizes, **cosine}, each.placements)
            self._totals[each.name] = sums.moved, sums.squares
            self._sharded |= {each.placements} - {""}

    def end_step(self) -> None:
        if self._totals:
            totals = (sum(column) for column in zip(*self._totals.values(), strict=True))
            self.give_model(_sizes(*totals), " ".join(sorted(self._sharded)))
        self._totals.clear()
        self._sharded.clear()


def _sizes(moved: float, squares: float) -> dict[str, float]:
    """Return the norm of an update, and the logarithm of its ratio to the weight if there is one.

    >>> _sizes(4.0, 40000.0)
    {'update_norm': 2.0, 'update_ratio': -2.0}
    """
    sizes = {"update_norm": math.sqrt(moved)}
    if moved > 0 and squares > 0:
        sizes["update_ratio"] = 0.5 * math.log10(moved / squares)
    return sizes
