"""Which iteration it is: calls of the model, those in training and in evaluation apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Moment(NamedTuple):
    """When a value was bound: its iteration, and which call of all it was."""

    iteration: int
    turn: int
    mode: str


class Tally:
    """The calls of one function, or of the model."""

    def __init__(self) -> None:
        self.total = 0
        self.by_mode = {"train": 0, "eval": 0}

    def add(self, mode: str) -> Moment:
        """One more."""
        moment = Moment(self.by_mode[mode], self.total, mode)
        self.by_mode[mode] += 1
        self.total += 1
        return moment


class Counts:
    """The calls of a model, and when it is time to gather.

    A function that is called outside of the model's forward, or whose target is no model, counts
    its own calls.
    """

    def __init__(self, every: int, mode: str, interval: int | None) -> None:
        self._every = every
        self._mode = mode
        self._interval = interval
        self._tally = Tally()
        self.last: Moment | None = None  # of the model
        self.taking = False  # whether this call of the model is one of those that are traced
        self._depth = 0
        self.model: Any = None
        self.in_backward: Callable[[], bool] | None = None

    @property
    def mode(self) -> str:
        """What the model does now."""
        return "train" if self.model is None or self.model.training else "eval"

    def begin_root(self, training: bool) -> int | None:
        """The model is called; a number if what was kept before that turn is to be gathered."""
        self._depth += 1
        self.last = self._tally.add("train" if training else "eval")
        self.taking = self.wants(self.last)
        return None if self._interval is None else self._due(self.last)

    def end_of_root(self) -> None:
        """The call of the model is over."""
        self._depth -= 1

    def begin_own(self, tally: Tally) -> tuple[Moment, int | None]:
        """A function that counts its own calls is called."""
        moment = tally.add(self.mode)
        # where the model is called, its calls say when to gather
        return moment, self._due(moment) if self.last is None else None

    def _due(self, moment: Moment) -> int | None:
        if self._interval is None or self._mode not in ("both", moment.mode):
            return None
        done = moment.turn if self._mode == "both" else moment.iteration
        return moment.turn if done and done % self._interval == 0 else None

    def now(self, of_root: bool) -> Moment | None:
        """The moment of a function that goes by the calls of the model; None: it counts its own."""
        if self.last is None or (of_root and not self._depth):
            return None
        return self.last

    def wants(self, moment: Moment) -> bool:
        """Whether this iteration is one of those that are traced."""
        return moment.iteration % self._every == 0 and self._mode in ("both", moment.mode)
