"""Run a program without a change to it, and track the models that it trains."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.core.ranks import rank_and_world_size
from tensortap.runs.init import finish, finish_at_exit, init, join, opened

if TYPE_CHECKING:
    from tensortap.rooms.health.torch.finding import TrainedModels

log = logging.getLogger("tensortap")


def run_program(
    words: Sequence[str], path: Path, *, module: bool, options: dict[str, Any]
) -> tuple[int, TrainedModels | None]:
    """Run a program as Python would, into an open run; return its exit code and its models.

    `module` is as ``python -m``. `options` are those of `track`. Models are those that torch
    optimizers train; None if the program did not import torch. A program that tracks by itself is
    left alone. Processes that it starts with `multiprocessing` are tracked, too: ranks of one job
    write into the run, others into runs of their own.
    """
    watching = _Watching(path, options)
    watching.begin()
    try:
        code = _execute(words, module)
    finally:
        watching.end()
    return code, watching.found


class _Watching:
    """Looks for the models of this process, and of those that it starts."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.path, self._options = path, options
        self.found: TrainedModels | None = None
        self._start: Any = None

    def begin(self) -> None:
        if "torch" in sys.modules:
            self._look()
        else:
            sys.meta_path.insert(0, _AfterImport("torch", self._look))
        self._start = start = BaseProcess.start
        watching = self

        @functools.wraps(start)
        def wrapped(process: BaseProcess) -> None:
            watching.before_start(process)
            start(process)

        BaseProcess.start = wrapped  # type: ignore[assignment,method-assign]

    def _look(self) -> None:
        from tensortap.rooms.health.torch.finding import TrainedModels

        self.found = TrainedModels(self._options)
        self.found.attach()

    def before_start(self, process: Any) -> None:
        """Have a new process look for models, too; workers of data loaders train none."""
        target = vars(process).get("_target")
        if target is None or getattr(target, "__module__", "").startswith("torch.utils.data"):
            return
        if opened() is not None and not (self.found and self.found.models):
            finish()  # so that rank 0 among the new processes can write into it
        process._target = _Target(target, self.path, self._options)

    def end(self) -> None:
        sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _AfterImport)]
        BaseProcess.start = self._start  # type: ignore[method-assign]
        try:
            if self.found is not None:
                self.found.detach()
            if opened() is not None:
                finish_at_exit()
        except Exception:
            log.exception("tensortap: the run %s is not complete", self.path)


class _Target:
    """The function of a process that is started, which looks for models while it runs."""

    def __init__(self, target: Callable[..., Any], path: Path, options: dict[str, Any]) -> None:
        self._target, self._path, self._options = target, path, options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        path = self._path

        def open_run() -> None:
            nonlocal path
            if rank_and_world_size()[1] > 1:
                join(path)
            else:
                path = init(path.parent)

        watching = _Watching(path, {**self._options, "opens": open_run})
        watching.begin()
        try:
            return self._target(*args, **kwargs)
        finally:
            watching.end()
            for problem in watching.found.problems if watching.found is not None else ():
                log.warning("tensortap: tracking failed: %s", problem)


class _AfterImport:
    """Calls a function when a module has been imported: the program may prepare for the import."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                self._then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _execute(words: Sequence[str], module: bool) -> int:
    """Run a script or a module with its arguments, as Python does; return its exit code."""
    program = words[0]
    sys.argv = list(words)
    sys.path.insert(0, "" if module else str(Path(program).resolve().parent))
    code = 0
    try:
        if module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if ended.code is not None and not isinstance(ended.code, int):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be closed
                sys.stderr.write(f"{ended.code}\n")
    except BaseException as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        # as Python does: the run is marked as crashed
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
    for thread in threading.enumerate():  # they may train
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    return code
