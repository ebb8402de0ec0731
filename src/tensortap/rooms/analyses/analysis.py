"""The base class of analyses, what they are told about a step, and records of their numbers.

Hooks speak only on steps that are observed. Parameters and gradients are NumPy arrays over the
memory of this rank's part, valid during the call: whoever wants to keep one copies it.
"""

from __future__ import annotations

import array
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tensortap.capture.pipeline import pipeline
from tensortap.core import ranks
from tensortap.core.arguments import checked
from tensortap.core.record import Kind, Record
from tensortap.core.rooms import load
from tensortap.rooms.analyses.numbers import squares
from tensortap.stats.columns import RecordColumns

if TYPE_CHECKING:
    from tensortap.rooms.track.observer import Observer
    from tensortap.rooms.track.observing import TrackHooks
    from tensortap.rooms.track.torch.track import TrackedModule


Give = Callable[[Kind, str, Mapping[str, float], str], None]


class OutputArray(NamedTuple):
    """A tensor in the output of a module, as an array over its memory.

    `channels` is the dimension that has the channels. `same_as` is the name under which the same
    tensor has just been seen, as where a container returns what its last module returned.
    """

    name: str
    array: NDArray[Any]
    channels: int
    same_as: str = ""


class ModuleOutput(NamedTuple):
    """One call of a module in a forward pass, and the tensors that it returned."""

    name: str
    module: Any
    call: int  # within the step
    arrays: tuple[OutputArray, ...]


class TrainedParameter(NamedTuple):
    """A parameter and its gradient, if it has one; `placements` if they are shards.

    `copies` is how many ranks have the same part of a model that is sharded: squares of the model,
    divided by it, add up over ranks.
    """

    name: str
    value: NDArray[Any]
    gradient: NDArray[Any] | None = None
    placements: str = ""
    copies: int = 1


class TrainedParameters(list[TrainedParameter]):
    """Parameters at one moment; what several analyses need of them is computed once."""

    @functools.cached_property
    def gradient_squares(self) -> dict[str, float]:
        found = {each.name: each.gradient for each in self if each.gradient is not None}
        return dict(zip(found, squares(list(found.values())), strict=True))


class Analysis:
    """Computes numbers in the steps that are observed; subclasses override what they listen to.

    `give` takes the numbers about a name, such as ``{"weight_norm": 2.5}``. They are recorded one
    by one, and are columns of the row of the LogFrame that has this kind and name. `unseen` takes
    names that cannot be analyzed, and why. `title` is the name of the model itself, `replicas` the
    number of ranks that average their gradients.
    """

    def __init__(
        self, give: Give, unseen: dict[str, str], model: Any, title: str, replicas: int
    ) -> None:
        self._give = give
        self.unseen = unseen
        self._title = title
        self.replicas = replicas
        self.begin(model)

    def begin(self, model: Any) -> None:
        """Begin with a model: forget everything."""

    def give(
        self, kind: Kind, name: str, numbers: Mapping[str, float], placements: str = ""
    ) -> None:
        """Record numbers about a tensor or a module; `placements` if they are about a shard."""
        self._give(kind, name, numbers, placements)

    def give_model(self, numbers: Mapping[str, float], placements: str = "") -> None:
        """Record numbers about the whole model: ``model.grad_norm``."""
        self._give(Kind.METRIC, self._title, numbers, placements)

    def output(self, seen: ModuleOutput) -> None:
        """Take the output of a module."""

    def attention(self, name: str, logits: NDArray[np.float64]) -> None:
        """Take logits of the attention in a module: sequence, head, query, key.

        They are those of a few queries; -inf stands for keys that a query does not see.
        """

    def gradient(self, name: str, gradient: NDArray[Any] | None) -> None:
        """Take what one backward pass adds to a gradient, before replicas average it.

        None says that this will be the whole gradient after the pass: nobody has to read it twice.
        """

    def after_backward(self, found: TrainedParameters) -> None:
        """Take all parameters after a backward pass: before anything clips their gradients."""

    def before_update(self, found: TrainedParameters) -> None:
        """Take the parameters of an optimizer before its step; with a closure, no gradients."""

    def after_update(self, found: TrainedParameters) -> None:
        """Take the parameters of an optimizer after its step."""

    def end_step(self) -> None:
        """End the step."""


def joined(placements: Iterable[str]) -> str:
    """Return the placements of several tensors as one text; those of whole tensors are empty."""
    return " ".join(sorted({*placements} - {""}))


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
        unseen = self._observer.unseen
        for name, family in self._families.items():
            give = functools.partial(self._give, name)
            self._analyses[name] = family(give, unseen, model, title, replicas)

    def tell(self, event: str, *what: Any) -> None:
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
