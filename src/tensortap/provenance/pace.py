"""Work in small slices, so that the training thread hardly notices.

A background thread that computes holds the interpreter lock until somebody has waited five
milliseconds for it. One that goes to sleep after half a millisecond gives it up before that.
"""

from __future__ import annotations

import time

SLICE = 0.0004  # seconds of work
PAUSE = 0.004  # seconds of rest after each


class Stopped(Exception):
    """Nobody waits for this work any more."""


class Pace:
    """Call it between two small pieces of work; now and then it sleeps, or says to stop.

    >>> pace = Pace()
    >>> for piece in range(3):
    ...     pace()
    """

    def __init__(self, work: float = SLICE, rest: float = PAUSE) -> None:
        self._work = work
        self.rest = rest  # 0: at full speed, for somebody waits
        self._until = time.perf_counter() + work
        self.stopped = False
        self.slices = 0
        self.longest = 0.0  # seconds, between two looks at the clock in one slice
        self.busy = 0.0

    def __call__(self) -> None:
        now = time.perf_counter()
        if now < self._until:
            return
        if self.stopped:
            raise Stopped
        took = now - self._until + self._work
        self.busy += took
        self.longest = max(self.longest, took)
        self.slices += 1
        if self.rest > 0:
            time.sleep(self.rest)
        self.resume()

    def resume(self) -> None:
        """Begin a slice: whoever calls this has just waited, with the interpreter lock free."""
        self._until = time.perf_counter() + self._work
