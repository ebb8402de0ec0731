"""Start worker processes: as a fresh interpreter, or by forking."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tensortap.core.arguments import check_choice
from tensortap.core.errors import TensortapError
from tensortap.rooms.watch.worker_process import Orders, forked, spawned
from tensortap.values.registry import parts

START_METHODS = ("spawn", "fork")
_ROOT = str(Path(__file__).parents[2])
# sys.path[0] replaces the working folder, where any file may shadow a module of ours
_START = "import sys; sys.path[0] = {root!r}; from {module} import {name}; {name}({fd})"


@dataclasses.dataclass(frozen=True)
class Task:
    """The functions of a worker, and the options for its start and end."""

    name: str
    recorder: Any
    on_close: Callable[[], object] | None
    timeout: float
    per_name: int  # records of one name that may wait in the worker
    budget: int
    daemon: bool
    start_method: str = "spawn"
    functions: bytes = b""  # the pickle of what a spawned worker calls


def launch(task: Task, key: bytes, line: socket.socket) -> SpawnedProcess | ForkedProcess:
    """Start a worker that talks to us over this socket."""
    orders = Orders(
        key, os.getpid(), task.timeout, task.budget, task.per_name, task.functions,
        tuple(map(str, sys.path)),
    )  # fmt: skip
    # block Ctrl-C until the worker ignores it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        if task.start_method == "fork":
            _check_fork()
            process: SpawnedProcess | ForkedProcess = ForkedProcess(task, orders, line)
        else:
            process = SpawnedProcess(orders, line)
        with contextlib.suppress(OSError):  # if memory gets short, it goes before the trainer
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
        return process
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def with_start_method(task: Task, start_method: str | None) -> Task:
    """Return a task with a start method that works; raise if there is none.

    By default a worker is spawned, or forked if it could not import the functions of the task.
    """
    if start_method is not None:
        check_choice("start_method", start_method, START_METHODS)
    if start_method != "fork":
        try:
            return dataclasses.replace(task, functions=_pickled(task))
        except TensortapError:
            if start_method is not None or not _can_fork():
                raise
    _check_fork()
    return dataclasses.replace(task, start_method="fork")


def _can_fork() -> bool:
    return all(part.survives_fork() for part in parts("tensortap.rooms.watch"))


def _check_fork() -> None:
    if not _can_fork():
        raise TensortapError(
            "start_method='fork' does not work after CUDA was initialized: use 'spawn', or call "
            "tap.watch before anything touches the GPU"
        )


def _pickled(task: Task) -> bytes:
    """Return the pickle of the functions that a worker calls; raise if it cannot import them."""
    stream = io.BytesIO()
    try:
        _TaskPickler(stream).dump((task.recorder, task.on_close))
    except Exception as error:
        raise TensortapError(
            f"{_name_of(task.recorder)} cannot be sent to a worker: {error}. A worker imports what "
            "it calls: put it into a module of its own, or pass start_method='fork' to tap.watch, "
            "before CUDA is initialized"
        ) from error
    return stream.getvalue()


class _TaskPickler(pickle.Pickler):
    """Rejects what is defined in the main module, which a worker does not import.

    Importing it again would train again in every script without ``if __name__ == "__main__"``.
    """

    def reducer_override(self, value: Any) -> Any:
        # in a process that multiprocessing has spawned, the main module has another name
        if getattr(value, "__module__", None) in ("__main__", "__mp_main__"):
            raise TensortapError(f"{_name_of(value)} is defined in the main module")
        return NotImplemented


def _name_of(value: Any) -> str:
    return getattr(value, "__qualname__", None) or f"{value!r:.80}"


class SpawnedProcess:
    """A fresh interpreter that gets its orders over standard input."""

    def __init__(self, orders: Orders, line: socket.socket) -> None:
        code = _START.format(
            root=_ROOT, module=spawned.__module__, name=spawned.__name__, fd=line.fileno()
        )
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", code], stdin=subprocess.PIPE, pass_fds=[line.fileno()]
        )
        self.pid = self._process.pid
        self.kill = self._process.kill
        # in a thread, because a write to a full pipe waits for the reader
        send = functools.partial(self._send, msgspec.msgpack.encode(orders))
        threading.Thread(target=send, name="tensortap-orders", daemon=True).start()

    def _send(self, orders: bytes) -> None:
        stream = self._process.stdin
        assert stream is not None
        with contextlib.suppress(BrokenPipeError), stream:  # its supervisor notices that it died
            stream.write(orders)

    def wait(self, timeout: float) -> int | None:
        """Wait for the process to end; return its exit code, or None if it still runs."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def let_go(self) -> None:
        """Do nothing: the program does not wait for a subprocess."""


class ForkedProcess:
    """A fork of this process, by the standard library's multiprocessing."""

    def __init__(self, task: Task, orders: Orders, line: socket.socket) -> None:
        import multiprocessing

        self._process = multiprocessing.get_context("fork").Process(
            target=forked, args=(orders, line, task.recorder, task.on_close),
            name="tensortap-worker",
        )  # fmt: skip
        self._process.start()
        self.pid = self._process.pid or 0
        self.kill = self._process.kill

    def wait(self, timeout: float) -> int | None:
        """Wait for the process to end; return its exit code, or None if it still runs."""
        self._process.join(timeout)
        return self._process.exitcode

    def let_go(self) -> None:
        """Let the program end without waiting: multiprocessing joins its children at exit."""
        import multiprocessing.process

        getattr(multiprocessing.process, "_children", set()).discard(self._process)
