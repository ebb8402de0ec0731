"""Locks for code that signal handlers and finalizers may interrupt and call again.

They run between any two instructions of a thread, also while it holds a lock, and may capture a
value there. So nothing on the way of a captured value waits for a lock without an end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

_TIMEOUT = 1.0  # seconds; no thread of ours holds a lock for that long
_POLL = 0.05  # seconds after which a thread that waits looks again

importing = threading.RLock()
"""Held while one of our modules is imported late.

A fork while another thread imports a module would leave the child with a lock that stays locked.
"""
os.register_at_fork(
    before=importing.acquire,
    after_in_parent=importing.release,
    after_in_child=importing.release,
)


class SafeLock:
    """A lock that never deadlocks: `acquire` returns False where an ordinary one would.

    A handler must not wait for its own thread. Nor for long for another one: that may be in the
    same position, with two locks exchanged.
    """

    __slots__ = ("_held", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held = False  # changed only by the thread that has the lock

    def acquire(self) -> bool:
        """Return whether this thread has the lock now; False if it had it already."""
        if not self._lock.acquire(timeout=_TIMEOUT):
            return False
        if self._held:
            self._lock.release()
            return False
        self._held = True
        return True

    def release(self) -> None:
        """Return the lock."""
        self._held = False
        self._lock.release()


class Notifier:
    """Lets threads wait for a condition that others change; `waiting` is how many do."""

    def __init__(self) -> None:
        self.waiting = 0
        self._changed = threading.Condition()

    def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `condition` holds; return False if time ran out."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self.waiting += 1
        try:
            with self._changed:
                while not condition():
                    left = _POLL if deadline is None else deadline - time.monotonic()
                    if left <= 0:
                        return False
                    self._changed.wait(min(left, _POLL))
            return True
        finally:
            self.waiting -= 1

    def notify(self) -> None:
        """Let the threads that wait look again."""
        if self.waiting and self._changed.acquire(timeout=_POLL):
            try:
                self._changed.notify_all()
            finally:
                self._changed.release()
