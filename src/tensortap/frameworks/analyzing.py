"""The seam of analyses: hooks say what happens in a step, whoever analyzes it decides what to do.

Hooks speak only on steps that are observed. Tensors are this rank's part, detached, and belong to
the program: whoever wants to keep one copies it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class ModuleOutput(NamedTuple):
    """One call of a module in a forward pass: what it got and what it returned."""

    name: str
    module: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    call: int  # within the step


class TrainedParameter(NamedTuple):
    """A parameter of an optimizer, and its gradient; `placements` if it is a shard."""

    name: str
    value: Any
    gradient: Any = None
    placements: str = ""


class ModelFacts(NamedTuple):
    """What hooks know about a model; `replicas` average their gradients."""

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

    def gradient(self, name: str, gradient: Any) -> None:
        """Take what one backward pass adds to a gradient, before replicas average it."""

    def after_backward(self, found: Sequence[TrainedParameter]) -> None:
        """Take all parameters after a backward pass: before anything clips their gradients."""

    def before_update(self, found: Sequence[TrainedParameter]) -> None:
        """Take the parameters of an optimizer before its step; with a closure, no gradients."""

    def after_update(self, found: Sequence[TrainedParameter]) -> None:
        """Take the parameters of an optimizer after its step."""

    def end_step(self) -> None:
        """End the step."""
