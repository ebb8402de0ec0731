"""A worker process that is minded, and the queue over which records go to it.

Records take the same way as to a live session: a background queue, the arena, a socket. What is
different is that the session is a process of our own, which is started, minded and ended here.
The training thread only ever appends to the queue.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

from tensortap.buffers import Pool
from tensortap.pipeline.queue import Background
from tensortap.pipeline.ticket import Ticket
from tensortap.record import Kind, Record
from tensortap.sinks.launch import Process, Task, launch, pickled
from tensortap.sinks.live import Live
from tensortap.wire import messages as wire
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
    Ready,
)
from tensortap.wire.worker import send as say

log = logging.getLogger("tensortap")

PATIENCE = 5.0  # seconds of waiting at the end after which it is said what for
RESTARTS = 3  # a worker that dies again and again is left dead
_ENDS: set[socket.socket] = set()  # our ends of all lines


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
        self._ended = False  # by us, since it hung
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
        self._line, theirs = socket.socketpair()
        _ENDS.add(self._line)
        try:
            self._process = launch(task, self._functions, key, theirs)
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
            self._ended = True
            process.kill()
            code = process.wait(5.0)
        _hang_up(line)
        with self._changed:
            self._runs = False
            self._done = done
            if done is not None:
                self.counts = done.counts
            words = (done.words if done is not None else "") or lines.words
            # one that leaves at the end says so, or its time was up
            left = done is not None or code == TIME_UP or self._ended
            died = not self._closing or not left
            if words:
                self.broken = words
            self._changed.notify_all()
        if died or words:
            self._died(queue, code, words)

    def _report(self, fault: Fault) -> None:
        log.warning(
            "tensortap: in the worker of %r, the code for %r raised; it goes on, and the same is "
            "only counted from here on, under whatever name:\n%s",
            self.task.name, fault.name, fault.text.rstrip(),
        )  # fmt: skip

    def _died(self, queue: Background, code: int | None, words: str) -> None:
        queue.close(0.0)  # nobody is there
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
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
            again = self.task.restart and self.restarts < RESTARTS and not self._closing
            then = "training goes on, what it watched goes nowhere"
            if again:
                then = "training goes on, it is started again"
            elif self._closing:
                then = f"{self.lost} records were not processed"
        log.error(
            "tensortap: the worker of %r died (%s); %s%s",
            self.task.name, how, then, f":\n{words.rstrip()}" if words else "",
        )  # fmt: skip
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
        told = time.monotonic() + PATIENCE
        try:
            # some of the time is the worker's: it may have to leave records and close its files
            until = time.monotonic() + (deadline - time.monotonic()) * 0.75
            while self._runs and (left := until - time.monotonic()) > 0:
                if self._queue.flush(min(left, 0.5)):  # it may die meanwhile
                    break
                told = self._tell(told, deadline)
        finally:  # also when somebody is impatient: it closes its files all the same
            say(self._line, End(max(0.1, deadline - time.monotonic())))
        if self.task.daemon:
            self._process.let_go()
            return
        with self._changed:
            while self._runs and time.monotonic() < deadline + 2.0:
                self._changed.wait(0.5)
                told = self._tell(told, deadline)
            hangs = self._runs
        if hangs:
            log.warning("tensortap: the worker of %r hung and was ended", self.task.name)
            self._ended = True
            self._process.kill()

    def _tell(self, when: float, deadline: float) -> float:
        """Nobody shall wonder, once, why a program does not end; when to say so next."""
        if time.monotonic() < when or not self._runs:
            return when
        waiting = self.sent - self.processed - self.failed - self.replaced
        log.warning(
            "tensortap: the worker of %r still has %d records to process; it is given %.0f more "
            "seconds (timeout=)", self.task.name, max(0, waiting), deadline - time.monotonic(),
        )  # fmt: skip
        return math.inf


def _hang_up(line: socket.socket) -> None:
    _ENDS.discard(line)
    line.close()


def _forget_lines() -> None:
    """A forked child must not hold our ends: a worker hears by them that we are gone."""
    for line in list(_ENDS):
        _hang_up(line)


os.register_at_fork(after_in_child=_forget_lines)
