"""Pass on what happens in a step to analyses, and make records of their numbers."""

from __future__ import annotations

import array
import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tensortap.capture.pipeline import pipeline
from tensortap.core import ranks
from tensortap.core.record import Kind, Record
from tensortap.rooms.health.analyses.families import family
from tensortap.rooms.health.analyzing import (
    ModelFacts,
    ModuleOutput,
    StepListener,
    TrainedParameters,
)
from tensortap.rooms.track.observer import Observer
from tensortap.stats.columns import RecordColumns

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_now = time.perf_counter_ns


class Analyses(StepListener):
    """Analyses of one model; whatever they raise is counted and never reaches the training."""

    def __init__(
        self,
        families: Iterable[str],
        observer: Observer,
    ) -> None:
        self._analyses = {
            name: family(name)(functools.partial(self._give, name), observer.unseen)
            for name in families
        }
        self._observer = observer
        self._heads: dict[tuple[Kind, str, str, str], Record] = {}
        self._given: dict[str, tuple[list[Record], list[float]]] = {}  # by family, in this step
        self._last: dict[str, tuple[Record, ...]] = {}  # heads that were sent, by family

    def wants(self, event: str) -> bool:
        return any(each.wants(event) for each in self._analyses.values())

    def _tell(self, event: str, *what: Any) -> None:
        start = _now()
        for name, analysis in self._analyses.items():
            try:
                getattr(analysis, event)(*what)
            except Exception as error:
                pipeline.fault(f"analysis {name}", error, f"raised in {event}")
        pipeline.ledger.track(_now() - start, 0)

    def attach(self, facts: ModelFacts) -> None:
        self._tell("attach", facts)

    def detach(self) -> None:
        self._tell("detach")
        self._send_given()
        self._heads.clear()
        self._last.clear()

    def output(self, seen: ModuleOutput) -> None:
        self._tell("output", seen)

    def attention(self, name: str, logits: NDArray[np.float64]) -> None:
        self._tell("attention", name, logits)

    def gradient(self, name: str, gradient: NDArray[Any] | None) -> None:
        self._tell("gradient", name, gradient)

    def after_backward(self, found: TrainedParameters) -> None:
        self._tell("after_backward", found)

    def before_update(self, found: TrainedParameters) -> None:
        self._tell("before_update", found)

    def after_update(self, found: TrainedParameters) -> None:
        self._tell("after_update", found)

    def end_step(self) -> None:
        self._tell("end_step")
        self._send_given()

    def _give(
        self, family: str, kind: Kind, name: str, numbers: Mapping[str, float], placements: str
    ) -> None:
        heads, values = self._given.setdefault(family, ([], []))
        heads.extend(self._head(kind, name, quantity, placements) for quantity in numbers)
        values.extend(map(float, numbers.values()))

    def _send_given(self) -> None:
        """Send the numbers of this step: together, because there are many of them."""
        given, self._given = self._given, {}
        for name, (heads, values) in given.items():
            same = tuple(heads)
            if same == self._last.get(name):
                same = self._last[name]
            self._last[name] = same
            self._observer.send_columns(self._columns(same, values))

    def _columns(self, heads: tuple[Record, ...], values: Sequence[float]) -> RecordColumns:
        seqs = [pipeline.next_seq() for _ in heads]
        times = [time.time_ns()] * len(heads)
        rank, world_size = ranks.rank_and_world_size()
        numbers = array.array("d", values).tobytes()
        return RecordColumns(
            heads, self._observer.step_number, seqs, rank, world_size, times, None, numbers
        )

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
