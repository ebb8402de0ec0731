"""How a worker process is started: as a fresh interpreter, a copy, or by a server of copies."""

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
from tensortap.wire.worker import Orders

START_METHODS = ("spawn", "fork", "forkserver")
_ROOT = str(Path(__file__).parents[2])
# in place of the working folder, in which anything may go by the name of a module of ours
_START = "import sys; sys.path[0] = {root!r}; from {module} import {name}; {name}({fd})"


@dataclasses.dataclass(frozen=True)
class Entries:
    """Where a worker begins, by how it is started; `functions_for` is for a forked one."""

    spawned: Callable[[int], None]
    served: Callable[[Orders, socket.socket], None]
    forked: Callable[..., None]
    functions_for: Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Task:
    """What a worker does, and how it is started and ended."""

    name: str
    recorder: Any
    on_close: Callable[[], object] | None
    entries: Entries
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
        """The exit code; None when it runs on."""
        ...

    def kill(self) -> None: ...

    def let_go(self) -> None:
        """The end of the program shall not wait for it."""
        ...


def launch(task: Task, functions: bytes, key: bytes, line: socket.socket) -> Process:
    """Start a worker that holds this end of a line."""
    main, is_module = _main_of(functions)
    orders = Orders(
        task.name, key, os.getpid(), task.timeout, task.budget, task.each, functions,
        main, is_module, tuple(map(str, sys.path)), tuple(sys.argv), _folder(),
    )  # fmt: skip
    with _no_interrupts():
        return _LAUNCH[task.start_method](task, orders, line)


def cuda_is_initialised() -> bool:
    """Whether this process has begun to use CUDA, which a fork does not survive."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return bool(cuda is not None and cuda.is_initialized())


def check_start_method(start_method: str) -> None:
    """Say what cannot work before anything is started."""
    if start_method not in START_METHODS:
        raise ValueError(f"start_method={start_method!r}: it is {', '.join(START_METHODS)}")
    if start_method == "fork" and cuda_is_initialised():
        raise TensortapError(
            "start_method='fork' after CUDA was initialised: the state of the driver cannot be "
            "forked. Use 'spawn', or call tap.watch before anything touches the GPU"
        )


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return ""


def pickled(task: Task) -> bytes:
    """What a worker is to call, as it is sent there; says what cannot be."""
    if task.start_method == "fork":
        return b""
    try:
        found: bytes = pickle.dumps((task.recorder, task.on_close))
    except Exception as error:
        raise TensortapError(
            f"{task.recorder!r:.80} cannot be sent to a worker ({error}): a lambda or a function "
            "inside a function has no name there. Use a function of a module, or "
            "start_method='fork'"
        ) from error
    return found


def _main_of(functions: bytes) -> tuple[str, bool]:
    """Where the main module lies, if what is pickled comes from there."""
    if b"__main__" not in functions:
        return "", False
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":  # else a folder or an archive that was run
        return spec.name, True
    path = getattr(main, "__file__", None)
    if path is None:
        raise TensortapError(
            "what the worker is to call is defined in an interactive session, which it cannot "
            "import: put it into a module, or use start_method='fork'"
        )
    return os.path.abspath(path), False


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    """Ctrl-C must not reach a worker that has not yet said that it ignores it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Spawned:
    """A fresh interpreter, which knows only what it is told."""

    def __init__(self, task: Task, orders: Orders, line: socket.socket) -> None:
        entry = task.entries.spawned
        fd = line.fileno()
        code = _START.format(root=_ROOT, module=entry.__module__, name=entry.__name__, fd=fd)
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", code], stdin=subprocess.PIPE, pass_fds=[fd]
        )
        self.pid = self._process.pid
        # not here: a pipe takes only so much before somebody reads from it
        words = msgspec.msgpack.encode(orders)
        tell = functools.partial(self._tell, words)
        threading.Thread(target=tell, name="tensortap-orders", daemon=True).start()

    def _tell(self, words: bytes) -> None:
        stream = self._process.stdin
        assert stream is not None
        with contextlib.suppress(BrokenPipeError), stream:  # it died: that is noticed elsewhere
            stream.write(words)

    def wait(self, timeout: float) -> int | None:
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self._process.kill()

    def let_go(self) -> None:
        """Nobody waits for it."""


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

        # or the end of the program would wait for it
        getattr(multiprocessing.process, "_children", set()).discard(self._process)


def _fork(task: Task, orders: Orders, line: socket.socket) -> Process:
    check_start_method("fork")
    functions = task.entries.functions_for(task.recorder, task.on_close)
    return _Multiprocessing("fork", task.entries.forked, (orders, line, functions))


def _fork_server(task: Task, orders: Orders, line: socket.socket) -> Process:
    # multiprocessing imports the main module itself, as it does for all that it starts
    orders = msgspec.structs.replace(orders, main="")
    try:
        return _Multiprocessing("forkserver", task.entries.served, (orders, line))
    except (EOFError, ConnectionError, RuntimeError) as error:
        raise TensortapError(
            f"the fork server of multiprocessing did not start a worker ({error!r}): it imports "
            "the main module, so a script needs if __name__ == '__main__'. start_method='spawn' "
            "does without"
        ) from error


_LAUNCH: dict[str, Callable[[Task, Orders, socket.socket], Process]] = {
    "spawn": _Spawned,
    "fork": _fork,
    "forkserver": _fork_server,
}
