"""The base class of analyses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from tensortap.frameworks.analyzing import ModelFacts, StepListener
from tensortap.record import Kind

Give = Callable[[Kind, str, Mapping[str, float], str], None]


class Analysis(StepListener):
    """Computes numbers in the steps that are observed; subclasses override what they listen to.

    `give` takes the numbers about a name, such as ``{"weight_norm": 2.5}``. They are recorded one
    by one, and are columns of the row of the LogFrame that has this kind and name. `unseen` takes
    names that cannot be analyzed, and why.
    """

    options: ClassVar[tuple[str, ...]] = ()
    """Names of options of its own, which the constructor takes."""

    def __init__(self, give: Give, unseen: dict[str, str]) -> None:
        self._give = give
        self.unseen = unseen
        self.facts = ModelFacts(None, "")

    def give(
        self,
        kind: Kind,
        name: str,
        numbers: Mapping[str, float],
        placements: str = "",
    ) -> None:
        """Record numbers about a tensor or a module; `placements` if they are about a shard."""
        self._give(kind, name, numbers, placements)

    def give_model(self, numbers: Mapping[str, float], placements: str = "") -> None:
        """Record numbers about the whole model: ``model.grad_norm``."""
        self._give(Kind.METRIC, self.facts.title, numbers, placements)

    def attach(self, facts: ModelFacts) -> None:
        """Begin with a model."""
        self.facts = facts

    def detach(self) -> None:
        """Let go of everything."""
        self.facts = ModelFacts(None, "")
