"""Callback for the Hugging Face Trainer: ``Trainer(..., callbacks=[Track(every=10)])``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tensortap.core.errors import MissingExtra
from tensortap.rooms.integrations.training import TrackCallback, guarded

if TYPE_CHECKING:
    from typing import Self

    TrainerCallback = object
else:
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise MissingExtra(
            "the callback for the Hugging Face Trainer needs transformers: "
            f"pip install transformers ({error})"
        ) from error


class TransformersTrack(TrackCallback, TrainerCallback):
    """Track the model of a Hugging Face training and its optimizer.

    The options are those of `tap.track`. With `run`, each training opens a run below that folder
    and finishes it at its end. A step is an optimizer step, numbered as ``state.global_step``
    when it begins; accumulated batches are calls of one step. What the Trainer logs becomes
    metrics of the step before. An alert with ``on_alert="stop"`` sets
    ``control.should_training_stop``. `tracker` is available once the training has begun.

    The Trainer does not report exceptions to its callbacks. ``with Track() as track:`` around
    ``train()`` removes the hooks in that case, too; otherwise the next training does, or
    ``track.close()``.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end(*error)

    @guarded
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin tracking: the optimizer exists, and a checkpoint has been loaded."""
        self._begin(kwargs["model"], kwargs.get("optimizer"), state.global_step)

    @guarded
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End an optimizer step."""
        if not self._end_step():
            control.should_training_stop = True

    @guarded
    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        """Keep what is logged as metrics of the step that has just ended."""
        self._log(logs or {}, state.global_step - 1)

    @guarded
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the hooks."""
        self._end()


Track = TransformersTrack
