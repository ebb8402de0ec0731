"""Work in small slices, so that the training thread hardly notices.

A background thread that computes keeps the interpreter lock until another thread has waited five
milliseconds for it. A thread that sleeps after half a millisecond releases it earlier.
"""

from __future__ import annotations

import time

SLICE = 0.0004  # seconds of work
PAUSE = 0.004  # seconds of rest after each slice


class Stopped(Exception):
    """The result of this work is no longer needed."""


class Pace:
    """Call it between two small pieces of work: it sleeps now and then.

    >>> pace = Pace()
    >>> for piece in range(3):
    ...     pace()
    """

    def __init__(self, rest: float = PAUSE) -> None:
        self.rest = rest  # 0: work at full speed, because somebody waits
        self.stopped = False
        self.resume()

    def __call__(self) -> None:
        if time.perf_counter() < self._until:
            return
        self.check()
        if self.rest > 0:
            time.sleep(self.rest)
        self.resume()

    def check(self) -> None:
        """Raise Stopped if the work is to end."""
        if self.stopped:
            raise Stopped

    def resume(self) -> None:
        """Begin a new slice, after waiting for something with the interpreter lock released."""
        self._until = time.perf_counter() + SLICE
