"""Start worker processes: as a fresh interpreter, by forking, or with a fork server."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tensortap.errors import TensortapError
from tensortap.frameworks.registry import loaded_frameworks
from tensortap.wire.worker import Orders

START_METHODS = ("spawn", "fork", "forkserver")
_ROOT = str(Path(__file__).parents[2])
# sys.path[0] replaces the working folder, where any file may shadow a module of ours
_START = "import sys; sys.path[0] = {root!r}; from {module} import {name}; {name}({fd})"


@dataclasses.dataclass(frozen=True)
class EntryPoints:
    """Functions in which a worker begins, by start method; `functions_for` is for forks."""

    spawned: Callable[[int], None]
    served: Callable[[Orders, socket.socket], None]
    forked: Callable[..., None]
    functions_for: Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Task:
    """The function of a worker, and the options for its start and end."""

    name: str
    recorder: Any
    on_close: Callable[[], object] | None
    entry_points: EntryPoints
    start_method: str = "spawn"
    timeout: float = 30.0
    each: int = 64
    budget: int = 256 << 20
    restart: bool = False
    daemon: bool = False


class Process(Protocol):
    """A process that was started."""

    pid: int

    def wait(self, timeout: float) -> int | None:
        """Wait for the process to end; return its exit code, or None if it still runs."""
        ...

    def kill(self) -> None: ...

    def let_go(self) -> None:
        """Let the program end without waiting for the process."""
        ...


def launch(task: Task, functions: bytes, key: bytes, line: socket.socket) -> Process:
    """Start a worker that talks to us over this socket."""
    main, is_module = _main_of(functions)
    orders = Orders(
        task.name, key, os.getpid(), task.timeout, task.budget, task.each, functions,
        main, is_module, tuple(map(str, sys.path)), tuple(sys.argv), _folder(),
    )  # fmt: skip
    with _no_interrupts():
        return _LAUNCH[task.start_method](task, orders, line)


def check_start_method(start_method: str) -> None:
    """Raise if a worker cannot be started by this method."""
    if start_method not in START_METHODS:
        raise ValueError(
            f"start_method must be one of {', '.join(START_METHODS)}, got {start_method!r}"
        )
    if start_method == "fork" and not all(each.survives_fork() for each in loaded_frameworks()):
        raise TensortapError(
            "start_method='fork' does not work after CUDA was initialized: use 'spawn', or call "
            "tap.watch before anything touches the GPU"
        )


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return ""


def pickled(task: Task) -> bytes:
    """Return the pickle of the functions that a worker calls; raise if they have none."""
    if task.start_method == "fork":
        return b""
    try:
        return pickle.dumps((task.recorder, task.on_close))
    except Exception as error:
        raise TensortapError(
            f"{task.recorder!r:.80} cannot be sent to a worker ({error}): the worker cannot import "
            "a lambda or a nested function. Use a function of a module, or start_method='fork'"
        ) from error


def _main_of(functions: bytes) -> tuple[str, bool]:
    """Return the path or name of the main module if a pickled function is defined there."""
    # in a process that multiprocessing has spawned, the main module has another name
    if b"__main__" not in functions and b"__mp_main__" not in functions:
        return "", False
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":  # else a folder or an archive that was run
        return spec.name, True
    path = getattr(main, "__file__", None)
    if path is None:
        raise TensortapError(
            "a worker cannot import functions that are defined in an interactive session: put "
            "them into a module, or use start_method='fork'"
        )
    return os.path.abspath(path), False


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    """Block Ctrl-C until the worker ignores it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Spawned:
    """A fresh interpreter that gets its orders over standard input."""

    def __init__(self, task: Task, orders: Orders, line: socket.socket) -> None:
        entry = task.entry_points.spawned
        fd = line.fileno()
        code = _START.format(root=_ROOT, module=entry.__module__, name=entry.__name__, fd=fd)
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", code], stdin=subprocess.PIPE, pass_fds=[fd]
        )
        self.pid = self._process.pid
        # in a thread, because a write to a full pipe waits for the reader
        send = functools.partial(self._send, msgspec.msgpack.encode(orders))
        threading.Thread(target=send, name="tensortap-orders", daemon=True).start()

    def _send(self, orders: bytes) -> None:
        stream = self._process.stdin
        assert stream is not None
        with contextlib.suppress(BrokenPipeError), stream:  # its supervisor notices that it died
            stream.write(orders)

    def wait(self, timeout: float) -> int | None:
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self._process.kill()

    def let_go(self) -> None:
        """Do nothing: the program does not wait for a subprocess."""


class _Multiprocessing:
    """A process of the standard library's multiprocessing."""

    def __init__(self, method: str, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        import multiprocessing

        context: Any = multiprocessing.get_context(method)
        self._process = context.Process(target=target, args=args, name="tensortap-worker")
        self._process.start()
        self.pid: int = self._process.pid

    def wait(self, timeout: float) -> int | None:
        self._process.join(timeout)
        code: int | None = self._process.exitcode
        return code

    def kill(self) -> None:
        self._process.kill()

    def let_go(self) -> None:
        import multiprocessing.process

        # multiprocessing joins its children at exit
        getattr(multiprocessing.process, "_children", set()).discard(self._process)


def _fork(task: Task, orders: Orders, line: socket.socket) -> Process:
    check_start_method("fork")
    functions = task.entry_points.functions_for(task.recorder, task.on_close)
    return _Multiprocessing("fork", task.entry_points.forked, (orders, line, functions))


def _fork_server(task: Task, orders: Orders, line: socket.socket) -> Process:
    # multiprocessing imports the main module itself
    orders = msgspec.structs.replace(orders, main="")
    try:
        return _Multiprocessing("forkserver", task.entry_points.served, (orders, line))
    except (EOFError, ConnectionError, RuntimeError) as error:
        raise TensortapError(
            f"the fork server of multiprocessing did not start a worker ({error!r}). It imports "
            "the main module: guard the script with if __name__ == '__main__', or use "
            "start_method='spawn'"
        ) from error


_LAUNCH: dict[str, Callable[[Task, Orders, socket.socket], Process]] = {
    "spawn": _Spawned,
    "fork": _fork,
    "forkserver": _fork_server,
}
