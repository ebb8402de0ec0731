"""A callback for Hugging Face's Trainer: ``Trainer(..., callbacks=[Track(every=10)])``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.errors import MissingExtra
from tensortap.integrations.training import Training, guarded

if TYPE_CHECKING:
    from typing import Self

    from tensortap.sources.track import Tracker


def _library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra(
            "the callback for Hugging Face's Trainer needs transformers: pip install transformers "
            f"({error})"
        ) from error
    return transformers


if TYPE_CHECKING:
    TrainerCallback = object
else:
    TrainerCallback = _library().TrainerCallback


class Track(TrainerCallback):
    """Track the model of a Hugging Face training, with its optimizer.

    The options are those of `tap.track`. `run` is a folder for a run of its own, as `tap.init`
    makes it, from the first step to the last; without it the records go where they would
    anyway. A step is one of the optimizer, numbered as ``state.global_step`` is when it begins;
    accumulated batches are calls of one step. What the Trainer logs becomes training statistics
    of the step that it was logged after. An alert that is to stop the training sets
    ``control.should_training_stop``. `tracker` is there from the beginning of the training on.

    The Trainer does not tell its callbacks of an exception. ``with Track() as track:`` around
    ``train()`` takes the hooks off then, too; else the next training does, or ``track.close()``.
    """

    def __init__(self, *, run: str | Path | None = None, **options: Any) -> None:
        super().__init__()
        self._training = Training(run, options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._training.end(*error)

    def close(self) -> None:
        """Track no more."""
        self._training.end()

    @property
    def tracker(self) -> Tracker | None:
        """The tracker of the latest training."""
        return self._training.tracker

    @property
    def path(self) -> Path | None:
        """The folder of the latest run, if `run` was given."""
        return self._training.path

    @guarded
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer is there, and a checkpoint has been read."""
        self._training.begin(kwargs["model"], _plain(kwargs.get("optimizer")), state.global_step)

    @guarded
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One step of the optimizer is over."""
        if not self._training.step():
            control.should_training_stop = True

    @guarded
    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        """The step that it is about is over already."""
        self._training.log(logs or {}, state.global_step - 1)

    @guarded
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The hooks are gone when this returns."""
        self._training.end()


def _plain(optimizer: Any) -> Any:
    """The optimizer inside of accelerate's wrapper, which has no hooks."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
