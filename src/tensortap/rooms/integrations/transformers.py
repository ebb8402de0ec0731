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
    """Track the model of a training and its optimizer; see `TrackCallback` for the options.

    A step is an optimizer step, numbered as ``state.global_step`` when it begins; accumulated
    batches are calls of one step. What the Trainer logs becomes metrics of the step before. The
    Trainer does not report exceptions: ``with Track() as track:`` removes the hooks then, the next
    training, or `close`.
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
        self._end()


Track = TransformersTrack
