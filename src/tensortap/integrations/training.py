"""A training that somebody else drives: what the callbacks of all trainers have in common."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tensortap.errors import StopTraining
from tensortap.pipeline.pipeline import pipeline
from tensortap.sources import init as runs
from tensortap.sources.track import Tracker, settings_of, track

log = logging.getLogger("tensortap")


class Training:
    """Tracks from `begin` to `end`; nothing that goes wrong in here reaches the trainer."""

    def __init__(self, run: str | Path | None, options: Mapping[str, Any]) -> None:
        settings_of(options)  # a mistake is said now, not in the middle of a training
        self.options = dict(options)
        self.folder = run
        self.path: Path | None = None
        self.tracker: Tracker | None = None
        self.active = False

    def begin(self, model: Any, optimizers: Any, step: int) -> None:
        """Track a model and its optimizers; what comes now belongs to `step`."""
        self.end()
        self.tracker = self.path = None
        self.active = True
        with _Guard("begin of the training"):
            if self.folder is not None:
                self.path = runs.init(self.folder)
            if pipeline.clock.owner is None:
                pipeline.clock.restart()  # the steps of an earlier training are over
            options = {"init_step": step, **self.options}
            tracker = track(model, optimizers, **options)
            self.tracker = tracker.__enter__()
            return
        self.end()  # it could not begin

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Numbers about the step under way, or about another one."""
        if self.active and self.tracker is not None:
            with _Guard("metrics"):
                self.tracker.log({n: v for n, v in metrics.items() if _is_number(v)}, step=step)

    def step(self) -> bool:
        """An optimizer step is over; False if the training is to stop."""
        if self.active and self.tracker is not None:
            with _Guard("end of a step"):
                try:
                    self.tracker.step()
                except StopTraining as stop:
                    log.warning("tensortap: the training is stopped: %s", stop)
                    return False
        return True

    def end(self, *error: object) -> None:
        """Track no more; the records stay."""
        if not self.active:
            return
        self.active = False
        with _Guard("end of the training"):
            if self.tracker is not None:
                self.tracker.__exit__(*error)
            if self.path is not None and _is_open(self.path):
                runs.finish()


class _Guard:
    """Counts and logs what goes wrong inside, and raises it only if that was asked for."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, cls: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        pipeline.fault(self.what, error)
        return True


def guarded(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of a callback, in which nothing can go wrong for the trainer."""
    import functools

    @functools.wraps(hook)
    def call(*args: Any, **kwargs: Any) -> None:
        with _Guard(hook.__name__):
            hook(*args, **kwargs)

    return call


def _is_number(value: Any) -> bool:
    if isinstance(value, (bool, int, float)):
        return True
    numel = getattr(value, "numel", None) or (lambda: getattr(value, "size", None))
    return hasattr(value, "__float__") and numel() == 1


def _is_open(path: Path) -> bool:
    opened = runs.opened()
    return opened is not None and opened.path == path
