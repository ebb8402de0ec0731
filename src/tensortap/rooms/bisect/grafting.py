"""Recorded tensors in place of those that a program computes: what hooks ask for and hand over."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tensortap.core.errors import NotFound
from tensortap.core.record import Kind, TensorData
from tensortap.rooms.bisect.recorded_step import RecordedStep
from tensortap.values.registry import parts

if TYPE_CHECKING:
    from tensortap.rooms.bisect.torch.grafts import ModelGrafts


class CallSite(NamedTuple):
    """One call of a module within the step, and the call of the module around it."""

    module: str
    call: int
    parent: CallSite | None = None


class Swap(NamedTuple):
    """A tensor that the program has computed, beside the recorded one.

    `name` is that of the record. `readers` returns the modules whose backward computed a gradient,
    or those that own a parameter. `random` says that the module has drawn random numbers, `certain`
    that everything it read is as in the reference, `before` that it is a weight before the step,
    and `unchanged` that it is one that the step has not changed.
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
    before: bool = False
    unchanged: bool = False


class GraftSource:
    """The tensors of a recorded step, as hooks ask for them."""

    def __init__(self, recorded: RecordedStep) -> None:
        self._recorded = recorded
        self.unjudged: dict[str, str] = {}
        self.notes: dict[str, Any] = {}

    @property
    def is_initial(self) -> bool:
        """Return whether these are the weights from before the first step."""
        return self._recorded.step < 0

    @property
    def evaluates(self) -> bool:
        """Return whether calls of a model in ``eval()`` mode count, as in the run."""
        return "eval" in self._recorded.modes

    def calls(self, module: str) -> int:
        """Return how many calls of a module are recorded in this step."""
        return self._recorded.calls(module)

    def states(self, parameter: str) -> list[str]:
        """Return which tensors of the optimizer's state are recorded for a parameter."""
        return self._recorded.states(parameter)

    def recorded(self, name: str, kind: Kind, call: int = 0) -> TensorData | None:
        """Return the recorded tensor; None to leave the computed one as it is."""
        try:
            return self._recorded.get(name, kind, call)
        except NotFound as error:
            if self._recorded.has(name, kind, call) or kind is Kind.WEIGHT:
                self.unjudged.setdefault(f"{name} ({kind.value})", str(error))
            return None

    def swap(self, swap: Swap) -> None:
        """Look at a tensor before the recorded one takes its place."""


def grafting(model: Any, source: GraftSource) -> ModelGrafts:
    """Return hooks that exchange the tensors of a model; raise TypeError for other objects."""
    for part in parts("tensortap.rooms.bisect"):
        hooks: ModelGrafts | None = part.graft(model, source)
        if hooks is not None:
            return hooks
    raise TypeError(
        f"model must be a torch.nn.Module, got {model!r:.100}; outputs inside compiled functions "
        "of JAX cannot be replaced"
    )
