"""Iterations of a tracer: calls of the model, counted separately in training and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Iteration(NamedTuple):
    """The number of a call within its mode, its number over both modes, and the mode."""

    number: int
    call: int
    mode: str


class FunctionCalls:
    """Counts the calls of the model, or of one function."""

    def __init__(self) -> None:
        self._total = 0
        self._by_mode = {"train": 0, "eval": 0}

    def count(self, mode: str) -> Iteration:
        """Count one call and return its iteration."""
        iteration = Iteration(self._by_mode[mode], self._total, mode)
        self._by_mode[mode] += 1
        self._total += 1
        return iteration


class IterationCounter:
    """Counts iterations, selects those to trace, and knows when to gather.

    A function that is called outside of the model's forward, or whose target is not a model,
    counts its own calls.
    """

    def __init__(self, every: int, mode: str, interval: int | None) -> None:
        self._every = every
        self._mode = mode
        self._interval = interval
        self._calls = FunctionCalls()
        self._depth = 0
        self.current: Iteration | None = None  # of the model
        self.selected = False  # whether the current iteration of the model is traced
        self.model: Any = None
        self.in_backward: Callable[[], bool] | None = None

    def begin(self, training: bool) -> int | None:
        """Count a call of the model; return the boundary if values before it are to be gathered."""
        self._depth += 1
        self.current = self._calls.count("train" if training else "eval")
        self.selected = self.selects(self.current)
        return self._boundary(self.current)

    def end(self) -> None:
        """End a call of the model."""
        self._depth -= 1

    def count_own(self, calls: FunctionCalls) -> tuple[Iteration, int | None]:
        """Count a call of a function that counts its own; return its iteration and boundary."""
        training = self.model is None or self.model.training
        iteration = calls.count("train" if training else "eval")
        # if the model is called at all, its calls decide when to gather
        return iteration, self._boundary(iteration) if self.current is None else None

    def _boundary(self, iteration: Iteration) -> int | None:
        if self._interval is None or self._mode not in ("both", iteration.mode):
            return None
        done = iteration.call if self._mode == "both" else iteration.number
        return iteration.call if done and done % self._interval == 0 else None

    def of_model(self, only_inside: bool) -> Iteration | None:
        """Return the current iteration of the model; with `only_inside`, only during its call."""
        return None if only_inside and not self._depth else self.current

    def selects(self, iteration: Iteration) -> bool:
        """Return whether the options select this iteration."""
        return iteration.number % self._every == 0 and self._mode in ("both", iteration.mode)
