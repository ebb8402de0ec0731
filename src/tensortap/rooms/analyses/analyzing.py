"""Analyses of the steps of a model: tell them what happens, and make records of their numbers."""

from __future__ import annotations

import array
import functools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from tensortap.capture.pipeline import pipeline
from tensortap.core import ranks
from tensortap.core.arguments import checked
from tensortap.core.record import Kind, Record
from tensortap.core.rooms import load
from tensortap.rooms.analyses.analysis import Analysis
from tensortap.stats.columns import RecordColumns

if TYPE_CHECKING:
    from tensortap.rooms.track.observer import Observer
    from tensortap.rooms.track.observing import TrackHooks
    from tensortap.rooms.track.torch.track import TrackedModule

Chosen: TypeAlias = bool | Sequence[str]
"""All families or none, or their names."""

FAMILIES: dict[str, str] = {
    "norms": "tensortap.rooms.analyses.parameters:Norms",
    "updates": "tensortap.rooms.analyses.parameters:Updates",
    "noise": "tensortap.rooms.analyses.parameters:GradientNoise",
    "activations": "tensortap.rooms.analyses.activations:Activations",
    "attention": "tensortap.rooms.analyses.torch.attention:AttentionHeads",
    "experts": "tensortap.rooms.analyses.experts:Experts",
}
"""The class of each family: they are imported only if somebody wants them."""


@checked
def chosen_families(analyses: Chosen) -> list[str]:
    """Return the families that the option `analyses` means."""
    if isinstance(analyses, Mapping):
        raise TypeError("analyses must be True, or a list of families, which have no options")
    chosen = FAMILIES if analyses is True else analyses or ()
    for name in chosen:
        if name not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise ValueError(f"analyses has no {name!r:.80}; choose from {known}, or pass True")
    return [name for name in FAMILIES if name in chosen]


class Analyses:
    """Analyses of one model; whatever they raise is counted and never reaches the training."""

    def __init__(self, chosen: Chosen, observer: Observer) -> None:
        self._families: dict[str, type[Analysis]] = {
            name: load(FAMILIES[name]) for name in chosen_families(chosen)
        }
        self._observer = observer
        self._analyses: dict[str, Analysis] = {}
        self._heads: dict[tuple[Kind, str, str, str], Record] = {}
        self._given: dict[str, tuple[list[Record], list[float]]] = {}  # by family, in this step
        self._last: dict[str, tuple[Record, ...]] = {}  # heads that were sent, by family

    def hooks(self, tracked: TrackedModule) -> TrackHooks:
        """Return hooks that tell the analyses what happens in a torch model."""
        from tensortap.rooms.analyses.torch.analyzed import AnalysisHooks

        return AnalysisHooks(tracked, self._observer, self)

    def wants(self, *events: str) -> bool:
        """Return whether anybody listens to one of these events: methods of `Analysis`."""
        return any(
            getattr(family, event) is not getattr(Analysis, event)
            for family in self._families.values()
            for event in events
        )

    def attach(self, model: Any, title: str, replicas: int) -> None:
        """Begin with a model."""
        unseen = self._observer.unseen
        for name, family in self._families.items():
            give = functools.partial(self._give, name)
            self._analyses[name] = family(give, unseen, model, title, replicas)

    def tell(self, event: str, *what: Any) -> None:
        """Tell all analyses what has happened."""
        start = time.perf_counter_ns()
        for name, analysis in self._analyses.items():
            try:
                getattr(analysis, event)(*what)
            except Exception as error:
                pipeline.fault(f"analysis {name}", error, f"raised in {event}")
        pipeline.ledger.track(time.perf_counter_ns() - start, 0)

    def end_step(self) -> None:
        self.tell("end_step")
        self._send_given()

    def detach(self) -> None:
        """End, and let go of everything."""
        self._send_given()
        self._analyses.clear()
        self._heads.clear()
        self._last.clear()

    def _give(
        self, family: str, kind: Kind, name: str, numbers: Mapping[str, float], placements: str
    ) -> None:
        heads, values = self._given.setdefault(family, ([], []))
        heads.extend(self._head(kind, name, quantity, placements) for quantity in numbers)
        values.extend(map(float, numbers.values()))

    def _send_given(self) -> None:
        """Send the numbers of this step: together, because there are many of them."""
        given, self._given = self._given, {}
        for name, (found, values) in given.items():
            heads = tuple(found)
            if heads == self._last.get(name):
                heads = self._last[name]  # the same tuple is encoded once
            self._last[name] = heads
            rank, world_size = ranks.rank_and_world_size()
            self._observer.send_columns(RecordColumns(
                heads, self._observer.step_number, [pipeline.next_seq() for _ in heads], rank,
                world_size, [time.time_ns()] * len(heads), None,
                array.array("d", values).tobytes(),
            ))  # fmt: skip

    def _head(self, kind: Kind, name: str, quantity: str, placements: str) -> Record:
        """Return a record without its number; its tags name the row of the LogFrame."""
        key = kind, name, quantity, placements
        known = self._heads.get(key)
        if known is None:
            prefix = self._observer.prefix
            tags = {"of": prefix + name, "kind": kind.value, "quantity": quantity}
            if kind is Kind.METRIC:  # of the whole model
                name, tags["kind"] = "model", Kind.ACTIVATION.value
            if placements:
                tags["placements"] = placements
            label = f"{prefix}{name}.{quantity}"
            known = Record(label, Kind.HEALTH, 0, 0, 0, 0, 1, 0, "builtins.float", tags=tags)
            self._heads[key] = known
        return known
