"""The listeners of health to the steps of a tracked model: analyses, and rules over steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensortap.core import ranks
from tensortap.rooms.health.analyses.families import Chosen, chosen_families
from tensortap.rooms.health.analyses.listener import Analyses
from tensortap.rooms.health.step_facts import StepFacts
from tensortap.rooms.health.steps import StepMonitor
from tensortap.rooms.track.observer import Observer
from tensortap.rooms.track.observing import TrackHooks

if TYPE_CHECKING:
    from tensortap.rooms.track.torch.track import TrackedModule


def analyses_of(chosen: Chosen, observer: Observer) -> StepAnalyses:
    """Return who analyzes the steps of a model."""
    return StepAnalyses(Analyses(chosen_families(chosen), observer), observer)


def step_rules_of(observer: Observer) -> StepRules | None:
    """Return who shows steps to the rules; None if no rule looks at steps."""
    monitor = StepMonitor(observer.rules)
    return StepRules(monitor, observer) if monitor else None


class StepAnalyses:
    """Analyses the steps of a model."""

    def __init__(self, analyses: Analyses, observer: Observer) -> None:
        self._analyses, self._observer = analyses, observer

    def hooks(self, tracked: TrackedModule) -> TrackHooks:
        from tensortap.rooms.health.torch.analyzed import AnalysisHooks

        return AnalysisHooks(tracked, self._observer, self._analyses)


class StepRules:
    """Shows the steps of a model to rules."""

    def __init__(self, monitor: StepMonitor, observer: Observer) -> None:
        self._monitor, self._observer = monitor, observer

    def hooks(self, tracked: TrackedModule) -> TrackHooks:
        from tensortap.rooms.health.torch.steps import StepHooks

        return StepHooks(tracked, self._observer, self._check)

    def _check(self, facts: StepFacts) -> None:
        for alert in self._monitor.check(facts, ranks.rank_and_world_size()[0]):
            self._observer.raise_alert(alert)
