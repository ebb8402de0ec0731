"""A worker process: the user's own code, on the records that a training process sends.

It is a live session of its own, on a port and with a key that only its parent knows. One thread
listens, one minds the parent, and the main thread calls the user's functions, as slowly as they
are. When the parent says so, or has gone however it went, what has arrived is processed, the
user's files are closed, and the worker leaves, all of it within the time it was given.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import threading
import time
import traceback
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from tensortap.record import Record
from tensortap.server.inbox import Inbox
from tensortap.server.server import Server
from tensortap.wire.address import Address
from tensortap.wire.worker import (
    TIME_UP,
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
    send,
)

_LOOK = 0.5  # seconds between two looks at the parent where the system does not tell of its end
_IDLE = 1.0  # seconds without a record after which files are brought up to date
_LAST_WORDS = 1.0  # seconds in which what a parent sent before it died may still arrive
_DRAIN = 0.75  # of the time at the end is for what has arrived, the rest for closing files
_TELL = 0.25  # seconds between two words to the parent about how many were processed
_NICE = 10  # training has the right of way
_DEEP = 20  # calls by which two errors are told apart
_MOST_FAULTS = 1000


class Functions(NamedTuple):
    """What a worker calls."""

    on_record: Callable[[Record], object]
    on_close: Callable[[], object] | None = None
    on_idle: Callable[[], object] | None = None


class TimeUp(BaseException):
    """Raised in the user's code when the time at the end is over."""


class Worker:
    """The work of one process; `run` returns when it is done."""

    def __init__(self, orders: Orders, line: socket.socket, load: Callable[[], Functions]) -> None:
        self._orders = orders
        self._line = line
        self._load = load
        self._inbox = Inbox(orders.bound, orders.each)
        self._server: Server | None = None
        self._processed = self._failed = 0
        self._faults: set[object] = set()
        self._asked: list[int] = []  # that wait for everything to be processed
        self._in_user_code = False
        self._ending = threading.Event()
        self._end_at = 0.0
        self._time_is_up = False
        self._finished = threading.Event()

    def run(self) -> int:
        """Work until the end; the exit code of the process."""
        self._settle_in()
        threading.Thread(target=self._mind, name="tensortap-parent", daemon=True).start()
        words = ""
        functions = None
        try:
            self._server = Server(Address("127.0.0.1", 0), self._inbox, self._orders.key)
            send(self._line, Ready(self._server.address.port))
            functions = self._load()
            self._work(functions)
        except TimeUp:
            pass
        except BaseException:
            words = traceback.format_exc()
        self._end(self._orders.timeout)
        left = len(self._inbox)
        self._close(functions)
        self._finished.set()
        send(self._line, Done(self._counts(), words, left))
        return 1 if words else 0

    def _settle_in(self) -> None:
        faulthandler.enable(self._line.fileno())  # a crash is told to the parent
        os.nice(_NICE)
        # whoever the user's code forks must not hold the line when we have gone
        os.register_at_fork(after_in_child=self._line.close)
        # Ctrl-C is for the whole group of processes: the parent says what follows from it
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self._end(self._orders.timeout))
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    # -- records -------------------------------------------------------------------------

    def _work(self, functions: Functions) -> None:
        told = time.monotonic()
        fresh = False  # whether something came since files were brought up to date
        while not self._time_is_up:
            record = self._inbox.take(_IDLE)
            if record is not None:
                fresh = True
                self._process(functions.on_record, record)
                if time.monotonic() > told + _TELL:  # should it die, this is what is known
                    told = time.monotonic()
                    send(self._line, Answer(UNASKED, self._counts()))
                continue
            if self._asked:
                self._idle(functions)
                fresh = False
                self._answer_drained()
            elif fresh:
                fresh = False
                self._idle(functions)
            if self._ending.is_set():
                self._stop_listening()  # nothing more comes; what has come is next
                if not len(self._inbox):
                    return

    def _process(self, on_record: Callable[[Record], object], record: Record) -> None:
        try:
            self._guarded(on_record, record)
            self._processed += 1
        except Exception as error:
            self._failed += 1
            self._fault(record.name, error)

    def _idle(self, functions: Functions) -> None:
        if functions.on_idle is not None:
            try:
                self._guarded(functions.on_idle)
            except Exception as error:
                self._fault("flush", error)

    def _guarded(self, call: Callable[..., object], *args: Any) -> None:
        self._in_user_code = True
        try:
            call(*args)
        finally:
            self._in_user_code = False

    def _fault(self, name: str, error: Exception) -> None:
        """Say it once, not once a name: a slip in the user's code is the same under all of them."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None and _is_ours(trace):
            trace = trace.tb_next  # from where we call it is of no interest
        places = [(frame.f_code, line) for frame, line in traceback.walk_tb(trace)]
        key = type(error), tuple(places[-_DEEP:])
        if key not in self._faults and len(self._faults) < _MOST_FAULTS:
            self._faults.add(key)
            words = traceback.format_exception(type(error), error, trace)
            send(self._line, Fault(name, "".join(words)))

    def _counts(self) -> Counts:
        return Counts(self._processed, self._failed, self._inbox.replaced)

    # -- the end -------------------------------------------------------------------------

    def _close(self, functions: Functions | None) -> None:
        self._stop_listening()
        if functions is None or functions.on_close is None:
            return
        try:
            functions.on_close()
        except Exception as error:
            self._fault("on_close", error)

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()

    def _end(self, timeout: float) -> None:
        """Finish what has arrived; the first to say so sets the time."""
        if not self._ending.is_set():
            self._end_at = time.monotonic() + timeout
            self._ending.set()
            self._inbox.wake()
            threading.Thread(
                target=self._watch_the_time, args=(timeout,), name="tensortap-time", daemon=True
            ).start()

    def _watch_the_time(self, timeout: float) -> None:
        if not self._finished.wait(timeout * _DRAIN):
            self._time_is_up = True
            # out of the user's code, if that is where it hangs: files are to be closed
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        time.sleep(max(0.0, self._end_at - time.monotonic()))
        os._exit(TIME_UP)

    def _on_alarm(self, *_: object) -> None:
        if self._time_is_up and self._in_user_code:
            raise TimeUp

    # -- the parent ----------------------------------------------------------------------

    def _mind(self) -> None:
        lines = Lines(self._line)
        ended = _end_of(self._orders.parent)
        poll = select.poll()  # not select: a forked worker has all descriptors of its parent
        for fd in (self._line.fileno(), ended):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        while not self._ending.is_set():
            ready = [fd for fd, _ in poll.poll(None if ended is not None else _LOOK * 1000)]
            if self._line.fileno() in ready:
                for message in lines.read():
                    if isinstance(message, Ask):
                        self._ask(message)
                    elif isinstance(message, End):
                        self._end(message.timeout)
            if self._ending.is_set():
                return
            # not by the socket alone: a process that was forked meanwhile may hold its other end
            if lines.ended or ended in ready or not _lives(self._orders.parent):
                self._hear_out()
                self._end(self._orders.timeout)

    def _hear_out(self) -> None:
        """What a parent had sent when it died is on its way; its connection ends behind it."""
        deadline = time.monotonic() + min(_LAST_WORDS, self._orders.timeout / 4)
        while time.monotonic() < deadline:
            server = self._server
            if server is not None and not any(c.connected for c in list(server.clients.values())):
                return
            time.sleep(0.01)

    def _ask(self, ask: Ask) -> None:
        if ask.drained:
            self._asked.append(ask.number)
            self._inbox.wake()
        else:
            send(self._line, Answer(ask.number, self._counts()))

    def _answer_drained(self) -> None:
        while self._asked and not len(self._inbox):
            send(self._line, Answer(self._asked.pop(0), self._counts()))


def _is_ours(trace: types.TracebackType) -> bool:
    return trace.tb_frame.f_globals is globals()


def _end_of(pid: int) -> int | None:
    """A descriptor that can be read once the process has ended; None where there is no such."""
    opener = getattr(os, "pidfd_open", None)
    if opener is None:
        return None
    try:
        found: int = opener(pid)
    except OSError:  # gone already, or an older kernel: it is looked for again and again
        return None
    return found


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
