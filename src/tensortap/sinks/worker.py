"""A worker process: its start, its end, and the queue over which records go to it.

Records take the same way as to a live session: a background queue, the arena, a socket. What is
different is that the session is a process of our own, which is started, minded and ended here.
The training thread only ever appends to the queue.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tensortap.buffers import Pool
from tensortap.errors import TensortapError
from tensortap.formats import wire
from tensortap.formats.address import Address
from tensortap.formats.worker import (
    UNASKED,
    Answer,
    Ask,
    Counts,
    Done,
    End,
    Fault,
    Lines,
    Orders,
    Ready,
)
from tensortap.formats.worker import send as say
from tensortap.record import Kind, Record
from tensortap.sinks.background import Background
from tensortap.sinks.live import Live
from tensortap.sinks.ticket import Ticket

log = logging.getLogger("tensortap")

START_METHODS = ("spawn", "fork", "forkserver")
RESTARTS = 3  # a worker that dies again and again is left dead
_ENDS: set[socket.socket] = set()  # our ends of all lines
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


class Worker:
    """A sink: one worker process behind a queue."""

    def __init__(
        self, task: Task, pool: Pool, client: Callable[[], wire.Client], *, arena: bool = True
    ) -> None:
        self.task = task
        self.counts = Counts()  # as the worker last said
        self.sent = 0
        self._flushed = 0  # how many had been sent when all were last known to be processed
        self.lost = 0  # sent, and nobody will process them
        self.restarts = 0
        self.broken = ""  # why it died, if it did
        self._functions = pickled(task)
        self._pool, self._client, self._arena = pool, client, arena
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._past = Counts()  # of workers that died
        self._queues: list[Background] = []
        self._numbers = itertools.count()
        self._answered: set[int] = set()
        self._closing = False
        self._done: Done | None = None
        self._start()

    # -- what the training thread asks ---------------------------------------------------

    @property
    def accepting(self) -> bool:
        return not self._closing and not self.broken

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._runs

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def replaced(self) -> int:
        """Records that newer ones of their name have pushed out, here or in the worker."""
        here = sum([queue.replaced for queue in self._queues])
        return here + self._past.replaced + self.counts.replaced

    @property
    def turned_away(self) -> int:
        """Values that found no room in the queue and were never copied."""
        return sum([queue.turned_away for queue in self._queues])

    @property
    def processed(self) -> int:
        """Records for which the user's function has returned, as far as the worker has said."""
        return self._past.processed + self.counts.processed

    @property
    def failed(self) -> int:
        """Records for which the user's function has raised."""
        return self._past.failed + self.counts.failed

    def admit(self, nbytes: int, name: str = "", kind: Kind = Kind.VALUE) -> bool:
        return self.accepting and self._queue.admit(nbytes, name, kind)

    def missed(self, name: str, kind: Kind, step: int, rank: int) -> None:
        """The queue counts what it turned away."""

    def write(self, record: Record, ticket: Ticket, nbytes: int) -> None:
        self.sent += 1
        self._queue.write(record, ticket, nbytes)

    def hurry(self) -> None:
        self._queue.hurry()

    # -- the process ---------------------------------------------------------------------

    def _start(self) -> None:
        task = self.task
        key = secrets.token_bytes(32)
        main, is_module = _main_of(self._functions)
        orders = Orders(
            task.name, key, os.getpid(), task.timeout, task.budget, task.each, self._functions,
            main, is_module, tuple(map(str, sys.path)), tuple(sys.argv),
            _folder(),
        )  # fmt: skip
        self._line, theirs = socket.socketpair()
        _ENDS.add(self._line)
        try:
            with _no_interrupts():
                self._process = _LAUNCH[task.start_method](task, orders, theirs)
        except BaseException:
            _hang_up(self._line)
            raise
        finally:
            theirs.close()
        self.counts = Counts()
        drain = Live(
            Address("127.0.0.1", 0), self._pool, client=self._client, arena=self._arena, key=key
        )
        self._queue = Background(drain, budget=task.budget, name=f"worker-{task.name}")
        self._queues.append(self._queue)
        self.broken = ""
        self._runs = True
        minder = functools.partial(self._mind, self._process, self._line, drain, self._queue)
        self._minder = threading.Thread(target=minder, name="tensortap-worker", daemon=True)
        self._minder.start()

    def _mind(self, process: Process, line: socket.socket, drain: Live, queue: Background) -> None:
        """Listen to the worker until it is gone."""
        lines = Lines(line)
        done = None
        while not lines.ended:
            for message in lines.read():
                if isinstance(message, Ready):
                    drain.address = Address("127.0.0.1", message.port)
                    queue.hurry()
                elif isinstance(message, Fault):
                    self._report(message)
                elif isinstance(message, Answer):
                    with self._changed:
                        self.counts = message.counts
                        if message.number != UNASKED:
                            self._answered.add(message.number)
                        self._changed.notify_all()
                elif isinstance(message, Done):
                    done = message
        code = process.wait(self.task.timeout + 5.0)
        if code is None:  # it has hung up, but does not leave
            process.kill()
            code = process.wait(5.0)
        _hang_up(line)
        with self._changed:
            self._runs = False
            self._done = done
            if done is not None:
                self.counts = done.counts
            words = (done.words if done is not None else "") or lines.words
            died = not self._closing
            if words:
                self.broken = words
            self._changed.notify_all()
        if died or words:
            self._died(queue, code, words)

    def _report(self, fault: Fault) -> None:
        log.warning(
            "tensortap: in the worker of %r, the code for %r raised; it goes on, and the same of "
            "this name is only counted from here on:\n%s",
            self.task.name, fault.name, fault.text.rstrip(),
        )  # fmt: skip

    def _died(self, queue: Background, code: int | None, words: str) -> None:
        queue.close(0.0)  # nobody is there
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        again = self.task.restart and self.restarts < RESTARTS and not self._closing
        then = "it is started again" if again else "what it watched goes nowhere"
        log.error(
            "tensortap: the worker of %r died (%s); training goes on, %s%s",
            self.task.name, how, then, f":\n{words.rstrip()}" if words else "",
        )  # fmt: skip
        with self._changed:
            before, now = self._past, self.counts
            self._past = Counts(
                before.processed + now.processed,
                before.failed + now.failed,
                before.replaced + now.replaced,
            )
            self.counts = Counts()
            self._count_lost()
            self.broken = words or how
            if not again:
                return
        self.restarts += 1
        try:
            self._start()
            if self._closing:  # meanwhile
                say(self._line, End(self.task.timeout))
        except Exception as error:
            self.broken = f"{how}; and it could not be started again: {error}"
            log.exception("tensortap: the worker of %r was not started again", self.task.name)

    def _count_lost(self) -> None:
        self.lost = max(0, self.sent - self.processed - self.failed - self.replaced)

    # -- waiting -------------------------------------------------------------------------

    def look(self, timeout: float = 1.0) -> None:
        """Have the worker say what has become of the records, if it answers in time."""
        self._ask(False, timeout)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything sent so far has been processed; False when time ran out."""
        sent = self.sent
        if sent == self._flushed:
            return True
        deadline = time.monotonic() + (self.task.timeout if timeout is None else timeout)
        if not self._queue.flush(max(0.0, deadline - time.monotonic())):
            return False
        if not self._ask(True, deadline - time.monotonic()):
            return False
        self._flushed = sent
        return True

    def _ask(self, drained: bool, timeout: float) -> bool:
        number = next(self._numbers)
        deadline = time.monotonic() + timeout
        if not self._runs or not say(self._line, Ask(number, drained)):
            return False
        with self._changed:
            while number not in self._answered and self._runs:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            found = number in self._answered
            self._answered.discard(number)
            return found

    def close(self, timeout: float | None = None) -> None:
        """Let the worker process everything that was sent, close its files and leave."""
        deadline = time.monotonic() + (self.task.timeout if timeout is None else timeout)
        with self._changed:
            if self._closing:
                return
            self._closing = True
            runs = self._runs
        try:
            if runs:
                self._finish(deadline)
        finally:
            self._queue.close(0.0)
        if runs and self.task.daemon:
            return
        self._minder.join(5.0)
        self._count_lost()
        if self.lost and not self.broken:
            log.warning(
                "tensortap: %d records were not processed by the worker of %r before its time "
                "was up; timeout= gives it more", self.lost, self.task.name,
            )  # fmt: skip

    def _finish(self, deadline: float) -> None:
        try:
            # some of the time is the worker's: it may have to leave records and close its files
            until = time.monotonic() + (deadline - time.monotonic()) * 0.75
            while self._runs and (left := until - time.monotonic()) > 0:
                if self._queue.flush(min(left, 0.5)):  # it may die meanwhile
                    break
        finally:  # also when somebody is impatient: it closes its files all the same
            say(self._line, End(max(0.1, deadline - time.monotonic())))
        if self.task.daemon:
            self._process.let_go()
            return
        with self._changed:
            while self._runs and time.monotonic() < deadline + 2.0:
                self._changed.wait(0.5)
            hangs = self._runs
        if hangs:
            log.warning("tensortap: the worker of %r hung and was ended", self.task.name)
            self._process.kill()


def _hang_up(line: socket.socket) -> None:
    _ENDS.discard(line)
    line.close()


def _forget_lines() -> None:
    """A forked child must not hold our ends: a worker hears by them that we are gone."""
    for line in list(_ENDS):
        _hang_up(line)


os.register_at_fork(after_in_child=_forget_lines)


# -- how a worker is started ---------------------------------------------------------------


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
