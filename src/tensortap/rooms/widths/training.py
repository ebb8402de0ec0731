"""The protocol by which `tap.rooms.widths.coord_check` trains a model and looks at its modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEARNING_RATE = 1e-3  # of Adam, if the user gives no optimizer


class WidthTask(NamedTuple):
    """Batch, loss, optimizer and seed of a training.

    `loss` is a function of outputs and targets, or None for cross-entropy (integer targets) or the
    mean squared error. `optimizer` is a function of the model or, in JAX, a transformation of
    optax; None for Adam.
    """

    inputs: Any
    targets: Any
    loss: Callable[[Any, Any], Any] | None
    optimizer: Any
    seed: int


class WidthTraining(Protocol):
    """A model that is trained on one batch."""

    def step(self) -> dict[str, NDArray[Any]]:
        """Train for one step; return the outputs of all modules before the update, by name."""
