"""Tickets: what `catch` returns, to ask whether a record has arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from tensortap.locks import Notifier


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
