"""Callback for Lightning: ``Trainer(callbacks=[Track(every=10, run="runs")])``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.core.errors import MissingExtra
from tensortap.rooms.integrations.training import TrackCallback, guarded


def _library() -> Any:
    """Return the Lightning that the program has imported; it exists under two names."""
    names = ("lightning.pytorch", "pytorch_lightning")
    reason = None
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reason = reason or error
    raise MissingExtra(
        f"the Lightning callback needs Lightning: pip install lightning ({reason})"
    ) from reason


if TYPE_CHECKING:
    Callback = object
else:
    Callback = _library().Callback


class LightningTrack(TrackCallback, Callback):
    """Track the model of a fit and its optimizers; see `TrackCallback` for the options.

    A step is an optimizer step, numbered as ``trainer.global_step`` when its batch begins;
    accumulated batches are calls of one step. The loss and what ``self.log`` logs become metrics.
    """

    def __init__(self, *, run: str | Path | None = None, **options: Any) -> None:
        super().__init__(run=run, **options)
        self._restart(0)

    def _restart(self, step: int) -> None:
        self._optimizer_steps = self._step = step
        self._loss: Any = None
        self._shown: dict[str, Any] = {}  # what the trainer showed last
        self._logged: dict[str, Any] = {}  # what was logged about the latest step

    @guarded
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin tracking: the optimizers exist, and a checkpoint has been loaded."""
        self._restart(trainer.global_step)
        self._begin(pl_module, list(trainer.optimizers), self._step)

    @guarded
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Remember what was logged before this batch."""
        self._shown = dict(trainer.callback_metrics)

    @guarded
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step if the optimizer has stepped, else accumulate the loss."""
        self._add_loss(outputs, pl_module.automatic_optimization)
        if trainer.global_step == self._optimizer_steps:
            return
        self._optimizer_steps = trainer.global_step
        loss = {} if self._loss is None else {"loss": self._loss}
        self._logged = {**loss, **self._new_metrics(trainer)}
        if self.tracker is not None and self.tracker.on:  # reading a number waits for the device
            self._log(self._logged)
        self._loss = None
        if not self._end_step():
            trainer.should_stop = True
        self._step += 1

    @guarded
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the metrics of the validation at the step before it."""
        if not trainer.sanity_checking:
            self._log_at_last_step(trainer)

    @guarded
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the metrics of the epoch at its last step."""
        self._log_at_last_step(trainer)

    @guarded
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._end()

    @guarded
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end(type(exception), exception, exception.__traceback__)

    def _add_loss(self, outputs: Any, automatic: bool) -> None:
        loss: Any = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not hasattr(loss, "detach"):
            return
        loss = loss.detach()
        # Lightning has divided it by the number of accumulated batches
        self._loss = loss if self._loss is None or not automatic else self._loss + loss

    def _log_at_last_step(self, trainer: Any) -> None:
        new = self._new_metrics(trainer).items()
        later = {name: value for name, value in new if not _equal(self._logged.get(name), value)}
        self._log(later, self._step - 1)
        self._logged |= later

    def _new_metrics(self, trainer: Any) -> dict[str, Any]:
        """Return what was logged since the last look; the trainer shows older metrics as well."""
        shown = dict(trainer.callback_metrics)
        new = {name: value for name, value in shown.items() if self._shown.get(name) is not value}
        self._shown = shown
        return new


def _equal(before: Any, now: Any) -> bool:
    """Return whether two numbers are equal, NaN included."""
    return before is not None and repr(float(before)) == repr(float(now))


Track = LightningTrack
