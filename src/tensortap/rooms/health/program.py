"""Run a program without a change to it, and track the models that it trains."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.runs.init import finish_at_exit, init, opened

if TYPE_CHECKING:
    from tensortap.rooms.health.torch.finding import TrainedModels

log = logging.getLogger("tensortap")


def run_program(
    words: Sequence[str], *, module: bool, folder: str | Path, options: dict[str, Any]
) -> tuple[Path, int, TrainedModels | None]:
    """Run a program as Python would, into a run; return its folder, exit code, and its models.

    `module` is as ``python -m``. `options` are those of `track`. Models are those that torch
    optimizers train; None if the program did not import torch. A program that tracks by itself is
    left alone.
    """
    path = init(folder)
    found: list[TrainedModels] = []

    def begin() -> None:
        from tensortap.rooms.health.torch.finding import TrainedModels

        found.append(TrainedModels(options))
        found[0].attach()

    if "torch" in sys.modules:
        begin()
    else:
        sys.meta_path.insert(0, _AfterImport("torch", begin))
    try:
        code = _execute(words, module)
    finally:
        sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _AfterImport)]
    try:
        for models in found:
            models.detach()
        if opened() is not None:
            finish_at_exit()
    except Exception:
        log.exception("tensortap: the run %s is not complete", path)
    return path, code, found[0] if found else None


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
