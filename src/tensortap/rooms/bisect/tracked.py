"""Bisect a program that `tensortap bisect` has started, at its first tracked model.

The command names a folder in the environment. The program finds the options there, and each rank
leaves its report. It ends after the judged step of its first tracked model.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tensortap.capture.pipeline import pipeline
from tensortap.core import ranks
from tensortap.core.errors import TensortapError
from tensortap.rooms.track.observer import Observer
from tensortap.rooms.track.observing import TrackHooks

if TYPE_CHECKING:  # every tracked program imports this file
    from tensortap.rooms.bisect.bisect import Bisection, BisectOptions
    from tensortap.rooms.bisect.faulty_modules import BisectReport

FOLDER = "TENSORTAP_BISECT"
"""Environment variable with the folder of options and reports."""
_OPTIONS = "options.msgpack"


def bisected(hooks: TrackHooks, model: Any, observer: Observer) -> TrackHooks:
    """Return hooks that also judge a step, if `tensortap bisect` has started this program."""
    folder = os.environ.pop(FOLDER, None)  # the first tracked model is the one
    return hooks if folder is None else BisectedHooks(hooks, model, observer, Path(folder))


def write_options(folder: Path, options: BisectOptions) -> None:
    """Write what the program is to do."""
    (folder / _OPTIONS).write_bytes(msgspec.msgpack.encode(options))


def read_reports(folder: Path) -> dict[int, BisectReport | str]:
    """Return the report of each rank, or why it has none."""
    from tensortap.rooms.bisect.faulty_modules import BisectReport

    found: dict[int, BisectReport | str] = {}
    for path in sorted(folder.glob("rank*")):
        kind: Any = str if path.suffix == ".error" else BisectReport
        found[int(path.stem[4:])] = msgspec.msgpack.decode(path.read_bytes(), type=kind)
    return found


class BisectedHooks:
    """The hooks of a tracker, and those that judge one of its steps."""

    def __init__(self, hooks: TrackHooks, model: Any, observer: Observer, folder: Path) -> None:
        from tensortap.rooms.bisect.bisect import Bisection, BisectOptions

        self._hooks = hooks
        self._observer = observer
        self._folder = folder
        data = (folder / _OPTIONS).read_bytes()
        options = msgspec.msgpack.decode(data, type=BisectOptions)
        self._bisection: Bisection | None = Bisection(model, options)
        self._active = False

    def attach(self) -> None:
        self._hooks.attach()
        self._begin_at(self._observer.step_number)

    def _begin_at(self, step: int) -> None:
        if self._bisection is not None and step == self._bisection.step and not self._active:
            self._active = True
            pipeline.switch(False)  # nobody records what is executed with values of another run
            self._bisection.begin()

    def end_step(self, *states: Any, **named: Any) -> None:
        self._hooks.end_step(*states, **named)
        if self._active and self._bisection is not None:
            self._bisection.hooks.end_step()
            self._finish()
            sys.exit(0)
        self._begin_at(self._observer.step_number + 1)

    def detach(self) -> None:
        try:
            if self._active and self._bisection is not None:  # the step did not end
                error = sys.exc_info()[1]
                if error is not None:
                    self._bisection.raised(error)
                self._finish()
        finally:
            self._hooks.detach()

    def _finish(self) -> None:
        """Write the report of this rank and remove the hooks."""
        bisection, self._bisection = self._bisection, None
        assert bisection is not None
        bisection.end()
        rank, _ = ranks.rank_and_world_size()
        result: BisectReport | str
        try:
            result = bisection.report()
        except TensortapError as error:
            result = str(error)
        suffix = ".error" if isinstance(result, str) else ".report"
        path = self._folder / f"rank{rank}{suffix}"
        path.write_bytes(msgspec.msgpack.encode(result, enc_hook=str))
