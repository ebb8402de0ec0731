"""The base class of analyses, and what they are told about a step.

Hooks speak only on steps that are observed. Parameters and gradients are NumPy arrays over the
memory of this rank's part, valid during the call: whoever wants to keep one copies it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.core.record import Kind
from tensortap.rooms.analyses.numbers import squares

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
        """Sums of the squares of gradients, by name."""
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
