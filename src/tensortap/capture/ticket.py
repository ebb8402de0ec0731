"""Tickets: what `catch` returns, to ask whether a record has arrived."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

_POLL = 0.05  # seconds after which a thread that waits looks again


class Notifier:
    """Lets threads wait for a condition that others change; `waiting` is how many do.

    Not a `threading.Condition`: that breaks if Ctrl-C raises while it waits.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self._bells: collections.deque[threading.Lock] = collections.deque()

    def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `condition` holds; return False if time ran out."""
        deadline = None if timeout is None else time.monotonic() + timeout
        bell, rung = threading.Lock(), True
        self.waiting += 1
        try:
            bell.acquire()
            while True:
                if rung:
                    self._bells.append(bell)  # first: the condition may change after the look
                if condition():
                    return True
                left = _POLL if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    return False
                rung = bell.acquire(timeout=min(left, _POLL))
        finally:
            self.waiting -= 1
            with contextlib.suppress(ValueError):
                self._bells.remove(bell)

    def notify(self) -> None:
        """Let the threads that wait look again."""
        if self.waiting:
            with contextlib.suppress(IndexError):
                while True:
                    self._bells.popleft().release()


class Ticket(msgspec.Struct, gc=False, eq=False):
    """One captured value on its way to its sinks.

    `wait` returns True when every sink that took the value has it, and False when the value was
    skipped or dropped, or when time ran out.
    """

    _open: int = 0  # sinks that have not settled it yet
    _hurry: Callable[[], None] | None = None
    failed: bool = False  # whether a sink has dropped it
    sinks: int = 1  # how many sinks have it, or will
    captured: bool = True  # whether the ledger counts it as a captured value

    @property
    def done(self) -> bool:
        """True when every sink has stored or dropped the record."""
        return self._open <= 0

    def wait(self, timeout: float | None = 10.0) -> bool:
        """Wait until the value has arrived; return False if it never will or time is up."""
        if self._open > 0:
            if self._hurry is not None:
                self._hurry()
            _settled.wait_for(lambda: self._open <= 0, timeout)
        return self._open <= 0 and not self.failed


def settle(entries: Iterable[Any], arrived: bool) -> None:
    """Tell the tickets of queue entries or blocks whether the records have arrived at a sink."""
    # without a lock: no other thread and no signal handler interrupts one of these statements
    for entry in entries:
        for ticket in (entry[1],) if isinstance(entry, tuple) else entry.tickets:
            if not arrived:
                ticket.failed = True
            ticket._open -= 1
    _settled.notify()


_settled = Notifier()

SKIPPED = Ticket(failed=True)
"""The ticket of every value that was skipped, or dropped before it was queued."""


def after_fork() -> None:
    """Replace the lock that a thread of the parent process may have held."""
    global _settled
    _settled = Notifier()
