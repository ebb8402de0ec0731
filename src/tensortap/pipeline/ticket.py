"""Tickets: what `catch` returns, to ask whether a record has arrived."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec


class Ticket(msgspec.Struct, gc=False, eq=False):
    """One captured value on its way to its sinks.

    `wait` returns True when every sink that took the value has it, and False when the value was
    skipped or dropped, or when time ran out.
    """

    _open: int = 0  # sinks that have not settled it yet
    _hurry: Callable[[], None] | None = None
    _failed: bool = False
    _sinks: int = 1
    captured: bool = True  # whether the ledger counts it as a captured value

    @property
    def shared(self) -> bool:
        """Whether several sinks took the value."""
        return self._sinks > 1

    @property
    def done(self) -> bool:
        """Whether every sink has settled it."""
        return self._open <= 0

    def wait(self, timeout: float | None = 10.0) -> bool:
        """Wait until the value has arrived; return False if it never will or time is up."""
        global _waiting
        if self._open > 0:
            if self._hurry is not None:
                self._hurry()
            deadline = None if timeout is None else time.monotonic() + timeout
            with _lock:
                _waiting += 1
            try:
                with _settled:
                    while self._open > 0:
                        left = None if deadline is None else deadline - time.monotonic()
                        if left is not None and left <= 0:
                            break
                        _settled.wait(left)
            finally:
                with _lock:
                    _waiting -= 1
        return self._open <= 0 and not self._failed


def settle(entries: Iterable[tuple[Any, Ticket, int]], arrived: bool) -> None:
    """Tell the tickets of these queue entries whether the records have arrived at a sink."""
    with _lock:
        for _, ticket, _ in entries:
            ticket._open -= 1
            if not arrived:
                ticket._failed = True
    if _waiting:
        with _settled:
            _settled.notify_all()


_lock = threading.Lock()
_settled = threading.Condition()
_waiting = 0

SKIPPED = Ticket(_failed=True)
"""The ticket of every value that was skipped, or dropped before it was queued."""


def after_fork() -> None:
    """Replace locks that a thread of the parent process may have held."""
    global _lock, _settled, _waiting
    _lock, _settled, _waiting = threading.Lock(), threading.Condition(), 0
