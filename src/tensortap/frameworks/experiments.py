"""The protocol by which `tap.check` makes experiments with a model."""

from __future__ import annotations

import contextlib
from typing import Any, Literal, NamedTuple, Protocol


class LossFact(NamedTuple):
    """A loss that a step computed, and what a model that knows nothing would reach.

    `is_relative`: what is large depends on the size of the targets.
    """

    function: str
    value: float
    expected: float
    is_relative: bool


Dependence = Literal["own", "others", "none", "random", "unknown"]


class ModelExperiments(Protocol):
    """Experiments with a model; whoever makes them puts its state back afterwards."""

    def same_structure(self, optimizer: Any) -> contextlib.AbstractContextManager[Any]:
        """Put back parameters that are replaced, frozen or given to the optimizer inside."""

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        """Remember how the model is called inside, and which losses are computed."""

    def losses(self) -> list[LossFact]:
        """Return the losses that were computed."""

    def dependence(self) -> Dependence:
        """Change one row of the batch, and return on which rows the outputs of others depend.

        ``"own"`` is right. ``"none"``: outputs do not depend on the batch. ``"random"``: they
        differ from call to call, so nobody can tell.
        """

    def is_random(self) -> bool | None:
        """Return whether outputs are random in evaluation mode; None if nobody can tell."""

    def workers_alike(self, loader: Any) -> bool | None:
        """Return whether workers of a loader draw the same random numbers.

        None if it has fewer than two workers, or draws none.
        """
