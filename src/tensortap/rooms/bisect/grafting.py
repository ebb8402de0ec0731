"""The protocol by which tensors of a running program are replaced by recorded ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from tensortap.core.record import Kind, TensorData


class CallSite(NamedTuple):
    """One call of a module within the step, and the call of the module around it."""

    module: str
    call: int
    parent: CallSite | None = None


class Swap(NamedTuple):
    """A tensor that the program has computed, beside the recorded one.

    `name` is that of the record. `readers` returns the modules whose backward computed a gradient,
    or those that own a parameter. `random` says that the module has drawn random numbers, `certain`
    that everything it read is as in the reference.
    """

    name: str
    kind: Kind
    computed: Any
    recorded: Any
    site: CallSite | None = None
    is_input: bool = False
    readers: Callable[[], tuple[str, ...]] = tuple
    random: bool = False
    certain: bool = True


class BeforeStep(Protocol):
    """Whoever provides weights and optimizer state from before a step."""

    def states(self, parameter: str) -> list[str]:
        """Return which tensors of the optimizer's state are recorded for a parameter."""

    def recorded(
        self, name: str, kind: Kind, call: int, shape: tuple[int, ...]
    ) -> TensorData | None:
        """Return the recorded tensor for one of this shape; None to leave it as it is."""


class GraftSource(BeforeStep, Protocol):
    """Whoever provides recorded tensors and judges computed ones."""

    judges: bool
    """Whether inputs, gradients and parameters are exchanged, not only outputs."""

    @property
    def evaluates(self) -> bool:
        """Return whether calls of a model in ``eval()`` mode count."""

    @property
    def step_number(self) -> int:
        """Return the training step; calls are counted from zero in each."""

    def selects(self, module: str) -> bool:
        """Return whether the outputs of a module are exchanged."""

    def calls(self, module: str) -> int:
        """Return how many calls of a module are recorded in this step."""

    def swap(self, swap: Swap) -> bool:
        """Judge a tensor; return whether the recorded one takes its place."""


class GraftHooks(Protocol):
    """Hooks that exchange the tensors of a model."""

    modules: list[str]
    """The names of all modules of the model."""

    stepping: Callable[[Any], object] | None
    """A function that is called with each optimizer before its step, or None."""

    def attach(self) -> None:
        """Install the hooks."""

    def detach(self) -> None:
        """Remove every hook."""

    def load(self, before: BeforeStep) -> None:
        """Put recorded weights and optimizer state into the program, before a step."""

    def end_step(self) -> None:
        """Hand over the gradients and weights that no optimizer step has shown."""

    @property
    def running(self) -> str:
        """The innermost module that has been called and has not returned; empty for none."""
