"""The base class of analyses, and memory for copies from one observed step to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.core.record import Kind
from tensortap.rooms.health.analyzing import ModelFacts, StepListener

LARGEST = 1 << 30
"""Bytes of copies that one analysis holds."""

Give = Callable[[Kind, str, Mapping[str, float], str], None]


class Analysis(StepListener):
    """Computes numbers in the steps that are observed; subclasses override what they listen to.

    `give` takes the numbers about a name, such as ``{"weight_norm": 2.5}``. They are recorded one
    by one, and are columns of the row of the LogFrame that has this kind and name. `unseen` takes
    names that cannot be analyzed, and why.
    """

    def __init__(self, give: Give, unseen: dict[str, str]) -> None:
        self._give = give
        self.unseen = unseen
        self.facts = ModelFacts(None, "")

    def give(
        self, kind: Kind, name: str, numbers: Mapping[str, float], placements: str = ""
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


class Copies:
    """Memory for `times` copies of each array, by name, as long as there is room."""

    def __init__(self, times: int = 1) -> None:
        self._times = times
        self._memory: dict[str, NDArray[Any]] = {}
        self._nbytes = 0

    def of(self, name: str, like: NDArray[Any]) -> tuple[NDArray[Any] | None, bool]:
        """Return memory for copies of an array, and whether it is that of the last time.

        None if there is no room.
        """
        known = self._memory.get(name)
        if known is not None and known.shape[1:] == like.shape and known.dtype == like.dtype:
            return known, True
        if known is not None:
            self._nbytes -= self._memory.pop(name).nbytes
        if self._nbytes + self._times * like.nbytes > LARGEST:
            return None, False
        made = self._memory[name] = np.empty((self._times, *like.shape), like.dtype)
        self._nbytes += made.nbytes
        return made, False

    def clear(self) -> None:
        """Let go of all copies."""
        self._memory.clear()
        self._nbytes = 0


def beyond() -> str:
    """Say that there is no room for all copies."""
    return (
        f"copies are bounded to {LARGEST >> 20} MiB, and some parameters are beyond: "
        "include= selects others"
    )
