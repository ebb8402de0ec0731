"""What `catch` returns: the way to ask whether a record has arrived."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Ticket:
    """One captured value on its way.

    `wait` says True when every sink that took the value has it, False when it was dropped,
    could not be caught, was skipped, or the time ran out.
    """

    __slots__ = ("_failed", "_hurry", "_open")

    def __init__(self, sinks: int = 0, hurry: Callable[[], None] | None = None) -> None:
        self._open = sinks
        self._failed = sinks == 0
        self._hurry = hurry

    @property
    def done(self) -> bool:
        """Whether the fate of the value is known."""
        return self._open <= 0

    def settle(self, arrived: bool) -> None:
        """One sink has it, or has lost it."""
        with _lock:
            self._open -= 1
            if not arrived:
                self._failed = True
            waiting = self._open <= 0 and _waiting > 0
        if waiting:
            with _settled:
                _settled.notify_all()

    def wait(self, timeout: float | None = 10.0) -> bool:
        """Wait until the value has arrived: True, or False when it never will or time is up."""
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


_lock = threading.Lock()
_settled = threading.Condition()
_waiting = 0

SKIPPED = Ticket()


def after_fork() -> None:
    """A child must not inherit a lock that a thread of the parent held."""
    global _lock, _settled, _waiting
    _lock, _settled, _waiting = threading.Lock(), threading.Condition(), 0
