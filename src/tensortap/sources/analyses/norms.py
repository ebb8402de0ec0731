"""Norms of weights and gradients: per parameter, per module and of the whole model."""

from __future__ import annotations

from collections.abc import Sequence

from tensortap.frameworks.analyzing import TrainedParameter
from tensortap.frameworks.view import array_of
from tensortap.record import Kind
from tensortap.sources.analyses.analysis import Analysis
from tensortap.stats.norms import norm


class Norms(Analysis):
    """Gives the norms of weights after the step of their optimizer."""

    def after_update(self, found: Sequence[TrainedParameter]) -> None:
        for each in found:
            numbers = {"weight_norm": norm(array_of(each.value))}
            self.give(Kind.WEIGHT, each.name, numbers, each.placements)
