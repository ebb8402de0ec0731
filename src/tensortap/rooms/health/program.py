"""Run a program without a change to it, and track the models that it trains."""

from __future__ import annotations

import contextlib
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tensortap.capture.pipeline import pipeline
from tensortap.rooms.track.track import Tracker, track
from tensortap.rooms.track.tracked_models import is_tracking
from tensortap.runs.init import finish, init, opened


def run_program(
    words: Sequence[str], *, module: bool, folder: str | Path, options: dict[str, Any]
) -> tuple[Path, int, int]:
    """Run a program as Python would, into a run; return its folder, exit code, and models.

    `module` is as ``python -m``. `options` are those of `track`. Models are those that torch
    optimizers train, as soon as the program calls them. A program that tracks by itself is left
    alone.
    """
    path = init(folder)
    trackers: list[Tracker] = []

    def begin(model: Any, optimizers: Sequence[Any]) -> Callable[[], None]:
        if is_tracking() and not trackers:
            return lambda: None
        tracker = track(model, list(optimizers), **options)
        tracker.__enter__()
        trackers.append(tracker)
        return tracker.step

    def fault(error: Exception) -> None:
        pipeline.fault("tensortap run", error, "does not track a model as it should")

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError):  # there is no torch
            from tensortap.rooms.health.torch.trained_models import TrainedModels

            stack.enter_context(TrainedModels(begin, fault))
        code = _execute(words, module)
    for tracker in trackers:
        tracker.__exit__(None, None, None)
    if opened() is not None:
        finish()
    return path, code, len(trackers)


def _execute(words: Sequence[str], module: bool) -> int:
    """Run a script or a module with its arguments; return its exit code."""
    program = words[0]
    sys.argv = list(words)
    sys.path.insert(0, "" if module else str(Path(program).resolve().parent))
    try:
        if module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as ended:
        if ended.code is not None and not isinstance(ended.code, int):
            sys.stderr.write(f"{ended.code}\n")
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        return 130
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        del sys.path[0]
    return 0
