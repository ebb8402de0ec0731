"""Tracking of a training loop that a trainer library runs, for all callbacks."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tensortap.capture.pipeline import pipeline
from tensortap.core.errors import StopTraining
from tensortap.rooms.track.track import Tracker, check_track_options, track
from tensortap.runs import init as runs

log = logging.getLogger("tensortap")


class TrackCallback:
    """Base of the callbacks: track a model; errors never reach the trainer.

    The options are those of `tap.track`. With `run`, each training opens a run below that folder
    and finishes it at its end. `tracker` is available once the training has begun.
    """

    def __init__(self, *, run: str | Path | None = None, **options: Any) -> None:
        super().__init__()
        check_track_options(options)  # raises for a wrong option now, not during the training
        self._options = options
        self._runs = run
        self._active = False
        self.tracker: Tracker | None = None  # of the latest training
        self.path: Path | None = None  # folder of the latest run, if `run` was given

    def close(self) -> None:
        self._end()

    def _begin(self, model: Any, optimizers: Any, step: int) -> None:
        self._end()
        self.tracker = self.path = None
        self._active = True
        try:
            if self._runs is not None:
                self.path = runs.init(self._runs)
            if pipeline.clock.owner is None:
                pipeline.clock.restart()  # drop the step of an earlier training
            tracker = track(model, optimizers, **{"init_step": step, **self._options})
            self.tracker = tracker.__enter__()
        except Exception as error:
            self._end()
            pipeline.fault("begin of the training", error)

    def _log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep numbers about the current step, or about another one."""
        if self._active and self.tracker is not None:
            with _logged_errors("metrics"):
                self.tracker.log({n: v for n, v in metrics.items() if _is_number(v)}, step=step)

    def _end_step(self) -> bool:
        """End an optimizer step; return False if an alert stops the training."""
        if self._active and self.tracker is not None:
            with _logged_errors("end of a step"):
                try:
                    self.tracker.step()
                except StopTraining as stop:
                    log.warning("tensortap: the training is stopped: %s", stop)
                    return False
        return True

    def _end(self, *error: object) -> None:
        """Stop tracking; the records stay."""
        if not self._active:
            return
        self._active = False
        with _logged_errors("end of the training"):
            if self.tracker is not None:
                self.tracker.__exit__(*error)
            opened = runs.opened()
            if opened is not None and opened.path == self.path:
                runs.finish()


@contextlib.contextmanager
def _logged_errors(name: str) -> Iterator[None]:
    """Count and log errors; raise them only in strict mode."""
    try:
        yield
    except Exception as error:
        pipeline.fault(name, error)


def guarded(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook of a callback so that its errors never reach the trainer."""

    @functools.wraps(hook)
    def call(*args: Any, **kwargs: Any) -> None:
        with _logged_errors(hook.__name__):
            hook(*args, **kwargs)

    return call


def _is_number(value: Any) -> bool:
    if isinstance(value, (bool, int, float)):
        return True
    numel = value.numel() if hasattr(value, "numel") else getattr(value, "size", None)
    return hasattr(value, "__float__") and numel == 1
