"""A callback for Lightning: ``Trainer(callbacks=[Track(every=10, run="runs")])``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.errors import MissingExtra
from tensortap.integrations.training import Training, guarded

if TYPE_CHECKING:
    from tensortap.sources.track import Tracker


def _library() -> Any:
    """The Lightning that the program has imported; both of its names are in use."""
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


class Track(Callback):
    """Track the model of a Lightning training, with its optimizers.

    The options are those of `tap.track`. `run` is a folder for a run of its own, as `tap.init`
    makes it, from the first step to the last; without it the records go where they would
    anyway. A step is one of the optimizer, numbered as ``trainer.global_step`` is when its
    batch begins; accumulated batches are calls of one step. What was logged with ``self.log``
    becomes training statistics, and so does the loss. An alert that is to stop the training
    sets ``trainer.should_stop``. `tracker` is there from the beginning of the fit on.
    """

    def __init__(self, *, run: str | Path | None = None, **options: Any) -> None:
        super().__init__()
        self._training = Training(run, options)
        self._restart(0)

    def _restart(self, step: int) -> None:
        self._optimizer_steps = self._step = step
        self._loss: Any = None
        self._logged: dict[str, Any] = {}
        self._said: dict[str, Any] = {}  # of the latest step

    @property
    def tracker(self) -> Tracker | None:
        """The tracker of the latest fit."""
        return self._training.tracker

    @property
    def path(self) -> Path | None:
        """The folder of the latest run, if `run` was given."""
        return self._training.path

    @guarded
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Optimizers are there, and a checkpoint has been read."""
        self._restart(trainer.global_step)
        self._training.begin(pl_module, list(trainer.optimizers), self._step)

    @guarded
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """What is shown by now was logged before this batch."""
        self._logged = dict(trainer.callback_metrics)

    @guarded
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """One optimizer step, if enough batches have been accumulated."""
        self._add_loss(outputs, pl_module.automatic_optimization)
        if trainer.global_step == self._optimizer_steps:
            return
        self._optimizer_steps = trainer.global_step
        loss = {} if self._loss is None else {"loss": self._loss}
        self._said = {**loss, **self._fresh(trainer)}
        tracker = self.tracker
        if tracker is not None and tracker.on:  # a number of a device has to be waited for
            self._training.log(self._said)
        self._loss = None
        if not self._training.step():
            trainer.should_stop = True
        self._step += 1

    @guarded
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """What was logged there is of the step before."""
        if not trainer.sanity_checking:
            self._log_later(trainer)

    @guarded
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """What was logged of a whole epoch is of its last step."""
        self._log_later(trainer)

    @guarded
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """The hooks are gone when this returns."""
        self._training.end()

    @guarded
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same, and the exception goes its way."""
        self._training.end(type(exception), exception, exception.__traceback__)

    def _add_loss(self, outputs: Any, automatic: bool) -> None:
        loss: Any = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not hasattr(loss, "detach"):
            return
        loss = loss.detach()
        # Lightning has divided it by the number of batches that are accumulated
        self._loss = loss if self._loss is None or not automatic else self._loss + loss

    def _log_later(self, trainer: Any) -> None:
        """What is known only now, about the step before."""
        fresh = self._fresh(trainer).items()
        later = {name: value for name, value in fresh if not _same(self._said.get(name), value)}
        self._training.log(later, self._step - 1)
        self._said |= later

    def _fresh(self, trainer: Any) -> dict[str, Any]:
        """What was logged since the last look; the trainer shows the earlier as well."""
        now = dict(trainer.callback_metrics)
        fresh = {n: v for n, v in now.items() if self._logged.get(n) is not v}
        self._logged = now
        return fresh


def _same(before: Any, now: Any) -> bool:
    """Whether it is the same number once more; NaN is, too."""
    return before is not None and repr(float(before)) == repr(float(now))
