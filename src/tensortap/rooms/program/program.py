"""Run a program without a change to it, and track the models that it trains."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import logging
import os
import runpy
import subprocess
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
    from tensortap.rooms.program.torch.finding import TrainedModels

log = logging.getLogger("tensortap")

_NOT_OF_THE_PROGRAM = __file__, runpy.run_path.__code__.co_filename  # lines of a traceback


def run_program(
    words: Sequence[str], path: Path, *, module: bool, options: dict[str, Any]
) -> tuple[int, TrainedModels | None]:
    """Run a program as Python would, into an open run; return its exit code and its models.

    `module` is as ``python -m``. `options` are those of `track`. Models are those that torch
    optimizers train; None if the program did not import torch. A program that tracks by itself is
    left alone. Processes that it starts with `multiprocessing`, and ranks that it starts with
    `subprocess`, are tracked, too: ranks of one job write into the run, others into their own.
    """
    watching = _Watching(path, options)
    watching.begin()
    try:
        code = execute(words, module)
    finally:
        watching.end()
    return code, watching.found


class _Watching:
    """Looks for the models of this process, and of those that it starts."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.path, self._options = path, options
        self.found: TrainedModels | None = None
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        if "torch" in sys.modules:
            self._look()
        else:
            sys.meta_path.insert(0, AfterImport("torch", self._look))
        self._wrap(BaseProcess, "start", self._before_start)
        self._wrap(subprocess.Popen, "__init__", self._before_popen)

    def _wrap(self, owner: Any, name: str, before: Callable[..., Any]) -> None:
        """Call a function before another, with its arguments, of which it may return others."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *(before(self, *args, **kwargs) or args), **kwargs)

        setattr(owner, name, wrapped)
        self._undo.append(functools.partial(setattr, owner, name, original))

    def _look(self) -> None:
        from tensortap.rooms.program.torch.finding import TrainedModels

        self.found = TrainedModels(self._options)
        self.found.attach()

    def _before_start(self, process: Any) -> None:
        """Have a new process look for models, too; workers of data loaders train none."""
        target = vars(process).get("_target")
        if target is None or getattr(target, "__module__", "").startswith("torch.utils.data"):
            return
        self._make_room()
        process._target = functools.partial(_call_target, target, self.path, self._options)

    def _before_popen(self, popen: Any, *args: Any, **kwargs: Any) -> Any:
        """Return other arguments if the command is a rank of a job: Python with a WORLD_SIZE."""
        command: Any = args[0] if args and type(args[0]) in (list, tuple) else ()
        size = (kwargs.get("env") or os.environ).get("WORLD_SIZE") or "1"
        if not command or size == "1" or rank_and_world_size()[1] > 1:
            return None
        words = [str(word) for word in command]
        is_program = (n for n, word in enumerate(words) if n and (word[:1] != "-" or word == "-m"))
        place = next(is_program, None) if "python" in Path(words[0]).name else None
        if place is None or "-c" in words[:place]:
            return None
        self._make_room()
        plain = {name: each for name, each in self._options.items() if name != "shows"}
        own = "-m", "tensortap.rooms.program.program", str(self.path), json.dumps(plain)
        return [*words[:place], *own, *words[place:]], *args[1:]

    def _make_room(self) -> None:
        """Let rank 0 among new processes write into the run, unless this one trains."""
        if opened() is not None and not (self.found and self.found.models):
            finish()

    def end(self) -> None:
        sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, AfterImport)]
        while self._undo:
            self._undo.pop()()
        try:
            if self.found is not None:
                self.found.detach()
            if opened() is not None:
                finish_at_exit()
        except Exception:
            log.exception("tensortap: the run %s is not complete", self.path)


def _call_target(target: Any, path: Path, options: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the function of a process that was started, and look for models while it runs."""
    return watched(functools.partial(target, *args, **kwargs), path, options)


def watched(call: Callable[[], Any], path: Path, options: dict[str, Any]) -> Any:
    """Call a function, and track its models: ranks in the run of the job, others in their own."""

    def open_run() -> None:
        nonlocal path
        if rank_and_world_size()[1] > 1:
            join(path)
        else:
            path = init(path.parent)

    watching = _Watching(path, {**options, "opens": open_run})
    watching.begin()
    try:
        return call()
    finally:
        watching.end()
        if "shows" in options:
            options["shows"].end()
        for problem in watching.found.problems if watching.found is not None else ():
            log.warning("tensortap: tracking failed: %s", problem)


class AfterImport:
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


def execute(words: Sequence[str], module: bool) -> int:
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
        lines = error.__traceback__
        while lines is not None and lines.tb_frame.f_code.co_filename in _NOT_OF_THE_PROGRAM:
            lines = lines.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, lines
        sys.excepthook(type(error), error.with_traceback(lines), lines)
    for thread in threading.enumerate():  # they may train
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    return code


def main() -> None:
    """Run a rank that a program has started: the path of the run, options, and its command."""
    path, options, *words = sys.argv[1:]
    module = words[0] == "-m"
    sys.exit(watched(lambda: execute(words[module:], module), Path(path), json.loads(options)))


if __name__ == "__main__":
    main()
