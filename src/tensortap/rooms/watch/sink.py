"""The sink that sends records to a worker process, which it starts, supervises and ends.

Records travel as they do to a live session: through a queue, the arena and a socket. The server
is a process of our own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tensortap.capture.ledger import DISCONNECTED, ERROR, OVER_BUDGET, TOO_LARGE, Entry, Ledger
from tensortap.capture.sink import Sink, Wake
from tensortap.core.arguments import check_choice
from tensortap.core.buffers import Pool
from tensortap.core.errors import TensortapError
from tensortap.core.limits import available_memory, shortage, total_memory
from tensortap.core.settings import flag
from tensortap.live.address import Address
from tensortap.live.sink import LiveSink
from tensortap.rooms.watch.worker_process import (
    TIME_UP,
    Done,
    End,
    Fault,
    MessageReader,
    Orders,
    Ready,
    WorkerCounts,
    forked,
    send,
    spawned,
)
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
        try:
            threading.Thread(target=send, name="tensortap-orders", daemon=True).start()
        except RuntimeError:  # no thread is left
            self.kill()
            self.wait(5.0)
            raise

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


log = logging.getLogger("tensortap")

_ENDS: set[socket.socket] = set()  # our ends of all sockets to workers


class _Exit(NamedTuple):
    """The exit code and the last words of a worker process."""

    code: int | None
    done: Done | None  # its last message, if it left in order
    words: str  # what it printed when it crashed


class WorkerSink(Sink):
    """Starts one worker process, sends it records, and notices when it ends."""

    def __init__(self, task: Task, pool: Pool) -> None:
        # in a small container, what waits here and in the worker takes a quarter of what is left
        self.budget = min(task.budget, available_memory() // 8)
        self._task = task = dataclasses.replace(task, budget=self.budget)
        self.ledger = Ledger()
        self.counts = WorkerCounts()  # as the worker last reported
        self.alive = True
        self.died = False
        self.closing = False
        self.lost = 0  # records that the worker had not processed when it died or ran out of time
        self._handed = 0  # records that the queue has handed over
        self._unsent = 0  # records that were still on their way to a worker that died
        self._changed = threading.Condition()
        self._killed = False  # by us, because it hung
        self._short = False  # by us, because memory is short
        self._checked = 0.0
        self._exit: _Exit | None = None
        self._detached = False  # the queue has closed: the supervisor handles the exit itself
        self._wake: Wake | None = None
        if lacking := shortage():
            raise TensortapError(lacking)
        key = secrets.token_bytes(32)
        self._line, theirs = socket.socketpair()
        _ENDS.add(self._line)
        try:
            self._process = launch(task, key, theirs)
        except BaseException:
            _hang_up(self._line)
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self.let_go = self._process.let_go
        address = Address("127.0.0.1", 0)  # the worker tells its port when it listens
        arena = not flag("TENSORTAP_NO_ARENA")
        try:
            self._live = LiveSink(address, pool, self.ledger, arena=arena, key=key)
            threading.Thread(target=self._supervise, name="tensortap-worker", daemon=True).start()
        except BaseException:
            self._process.kill()
            self._process.wait(5.0)
            _hang_up(self._line)
            raise

    # -- what the queue calls -------------------------------------------------------------

    @property
    def accepting(self) -> bool:
        return not self.closing and not self.died

    @property
    def unreachable(self) -> bool:
        return not self.alive

    @property
    def pending(self) -> int:
        return self._live.pending

    def room(self) -> int:
        return self._live.room() if self.alive else 0

    def send(self, entries: list[Entry]) -> None:
        self._handed += len(entries)
        self._live.send(entries)

    def wait(self, wake: Wake, timeout: float) -> None:
        self._wake = wake
        if self._exit is not None:
            self._handle_exit()
        if self.alive:
            self._end_if_memory_is_short()
            self._live.wait(wake, timeout)
        else:
            wake.wait(timeout)

    def give_up(self) -> list[Entry]:
        entries = self._live.give_up()
        self._unsent += len(entries)
        return entries

    def close(self) -> None:
        if self.alive:
            self._live.close()
        self._detached = True
        self._handle_exit()

    # -- counts ---------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Records that were handed over and are not processed or dropped."""
        reasons, counts = self.ledger.reasons(), self.counts
        arrived = self._handed - self._unsent - reasons[TOO_LARGE] - reasons[ERROR]
        done = counts.processed + counts.errors + counts.dropped
        return max(0, arrived - done - self.lost)

    def wait_until_processed(self, timeout: float) -> bool:
        """Wait until no record is outstanding; return False if time ran out or some were lost."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.outstanding, timeout) and not self.lost

    def reasons(self) -> dict[str, int]:
        """Return how many records were dropped, here or in the worker, by reason."""
        reasons = self.ledger.reasons()
        reasons[OVER_BUDGET] += self.counts.dropped
        reasons[ERROR] += self.counts.errors
        reasons[DISCONNECTED] += self.lost
        return reasons

    # -- the process ----------------------------------------------------------------------

    def _supervise(self) -> None:
        """Read the worker's messages until it ends; the queue's thread handles the exit."""
        reader = MessageReader(self._line)
        done = None
        while not reader.ended:
            for message in reader.read():
                if isinstance(message, Ready):
                    self._live.address = Address("127.0.0.1", message.port)
                    self._wake_queue()
                elif isinstance(message, Fault):
                    log.warning(
                        "tensortap: the function of worker %r raised for %r; it continues, and "
                        "further errors like this one are only counted:\n%s",
                        self._task.name, message.name, message.text.rstrip(),
                    )  # fmt: skip
                elif isinstance(message, WorkerCounts):
                    with self._changed:
                        self.counts = message
                        self._changed.notify_all()
                elif isinstance(message, Done):
                    done = message
        code = self._process.wait(self._task.timeout + 5.0)
        if code is None:  # it has closed the socket, but does not end
            self.kill()
            code = self._process.wait(5.0)
        _hang_up(self._line)
        self._exit = _Exit(code, done, reader.crash_text)
        if self._detached:
            self._handle_exit()
        else:
            self._wake_queue()

    def _end_if_memory_is_short(self) -> None:
        """Kill the worker before the kernel looks for a process to kill."""
        now = time.monotonic()
        if now - self._checked > 0.1 and not self._short:
            self._checked = now
            self._short = not memory_left()
            if self._short:
                self._process.kill()

    def _wake_queue(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def _handle_exit(self) -> None:
        """Count what was lost; log it unless the worker left in order."""
        with self._changed:  # the queue's thread and the supervisor may both find it
            ended, self._exit = self._exit, None
        if ended is None:
            return
        code, done, words = ended
        if not self._detached:
            self._live.close()
        self.ledger.drop(self.give_up(), DISCONNECTED)
        if done is not None:
            self.counts, words = done.counts, done.error or words
        in_order = done is not None or code == TIME_UP or self._killed
        lost = self.outstanding
        if words or not self.closing or not in_order:
            self.died = True
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            if self._short:
                how = "it was killed, because memory is short"
            then = "training continues without it"
            if self.closing:
                then = f"{lost} records were not processed"
            log.error(
                "tensortap: worker %r died (%s); %s%s",
                self._task.name, how, then, f":\n{words.rstrip()}" if words else "",
            )  # fmt: skip
        with self._changed:
            self.lost += lost
            self.alive = False
            self._changed.notify_all()

    def end(self, timeout: float) -> None:
        """Tell the worker to finish within `timeout` seconds."""
        send(self._line, End(max(0.1, timeout)))

    def wait_for_exit(self, timeout: float) -> bool:
        """Wait until the worker has ended; return False if time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.alive, timeout)

    def kill(self) -> None:
        """Kill the worker, because it hangs."""
        self._killed = True
        self._process.kill()


def needed_memory(recorder: object) -> int:
    """Return the bytes that a worker takes: the interpreter, NumPy, records on their way.

    A recorder that needs more has an attribute `needed_memory`.
    """
    needed = getattr(recorder, "needed_memory", 0)
    return max(96 << 20, needed) if isinstance(needed, int) else 96 << 20


def memory_left(nbytes: int = 0) -> bool:
    """Return whether training keeps a reserve of memory beside `nbytes` for a worker."""
    return available_memory() - nbytes >= min(128 << 20, total_memory() // 20)


def _hang_up(line: socket.socket) -> None:
    _ENDS.discard(line)
    line.close()


def _close_inherited() -> None:
    """Close our ends in a forked child: a worker notices by them that the program has ended."""
    for line in list(_ENDS):
        _hang_up(line)


os.register_at_fork(after_in_child=_close_inherited)
