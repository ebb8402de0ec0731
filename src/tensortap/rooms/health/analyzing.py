"""The seam of analyses: hooks say what happens in a step, whoever analyzes it decides what to do.

Hooks speak only on steps that are observed. Parameters and gradients are NumPy arrays over the
memory of this rank's part, valid during the call: whoever wants to keep one copies it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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
    """A parameter and its gradient, if it has one; `placements` if they are shards."""

    name: str
    value: NDArray[Any]
    gradient: NDArray[Any] | None = None
    placements: str = ""


class TrainedParameters:
    """Parameters at one moment; what several analyses need of them is computed once."""

    def __init__(self, items: Iterable[TrainedParameter]) -> None:
        self.items = tuple(items)

    def __iter__(self) -> Iterator[TrainedParameter]:
        return iter(self.items)

    @functools.cached_property
    def gradient_squares(self) -> dict[str, float]:
        """Sums of the squares of gradients, by name."""
        from tensortap.rooms.health.analyses.norms_stats import squares

        found = [(each.name, each.gradient) for each in self.items if each.gradient is not None]
        return dict(zip((name for name, _ in found), squares([g for _, g in found]), strict=True))


class ModelFacts(NamedTuple):
    """A model that is analyzed; `replicas` is the number of ranks that average their gradients."""

    model: Any
    title: str  # name of the model itself among the names of modules
    replicas: int = 1


class StepListener:
    """Listens to the steps of a model; subclasses override what they listen to."""

    def wants(self, event: str) -> bool:
        """Return whether anybody listens to an event: the name of a method below."""
        return getattr(type(self), event) is not getattr(StepListener, event)

    def attach(self, facts: ModelFacts) -> None:
        """Begin with a model."""

    def detach(self) -> None:
        """End, and let go of everything."""

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
