"""Pass on what happens in a step to analyses, and make records of their numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tensortap import ranks
from tensortap.frameworks.analyzing import (
    ModelFacts,
    ModuleOutput,
    StepListener,
    TrainedParameters,
)
from tensortap.pipeline.pipeline import pipeline
from tensortap.record import Kind, Record
from tensortap.sources.analyses.families import family

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_now = time.perf_counter_ns


class Analyses(StepListener):
    """Analyses of one model; whatever they raise is counted and never reaches the training."""

    def __init__(
        self,
        families: Mapping[str, Mapping[str, Any]],
        send: Callable[[Record], None],
        step: Callable[[], int],
        prefix: Callable[[], str],
        unseen: dict[str, str],
    ) -> None:
        self._analyses = {
            name: family(name)(self._give, unseen, **options) for name, options in families.items()
        }
        self.families = tuple(families)
        for analysis in self._analyses.values():
            analysis.current_step = step
        self._send, self._step, self._prefix = send, step, prefix
        self._tags: dict[tuple[Kind, str, str, str], tuple[str, dict[str, str]]] = {}

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
        self._tags.clear()

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

    def _give(
        self,
        kind: Kind,
        name: str,
        numbers: Mapping[str, float],
        placements: str,
        step: int | None,
    ) -> None:
        rank, world_size = ranks.rank_and_world_size()
        step = self._step() if step is None else step
        for quantity, number in numbers.items():
            label, tags = self._described(kind, name, quantity, placements)
            self._send(
                Record(
                    label, Kind.HEALTH, step, 0, pipeline.next_seq(), rank, world_size,
                    time.time_ns(), "builtins.float", value=float(number), tags=tags,
                )
            )  # fmt: skip

    def _described(
        self, kind: Kind, name: str, quantity: str, placements: str
    ) -> tuple[str, dict[str, str]]:
        """Return the name of a record, and its tags: the row of the LogFrame it belongs to."""
        key = kind, name, quantity, placements
        known = self._tags.get(key)
        if known is None:
            prefix = self._prefix()
            tags = {"of": prefix + name, "kind": kind.value, "quantity": quantity}
            if kind is Kind.METRIC:  # of the whole model
                name, tags["kind"] = "model", Kind.ACTIVATION.value
            if placements:
                tags["placements"] = placements
            known = self._tags[key] = f"{prefix}{name}.{quantity}", tags
        return known
