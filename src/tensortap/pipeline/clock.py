"""The training step: one axis for all sources."""

from __future__ import annotations

import threading


class Clock:
    """The training step; the first source to advance the clock owns it."""

    __slots__ = ("_lock", "owner", "step", "steps")

    def __init__(self) -> None:
        self.step: int | None = None
        self.owner: str | None = None
        self.steps = 0  # how many steps have passed, whatever their numbers
        self._lock = threading.Lock()

    def advance(self, owner: str, step: int | None = None) -> bool:
        """Go to the next step, or to `step`; return False if another source owns the clock."""
        with self._lock:
            if self.owner is None:
                self.owner = owner
            elif self.owner != owner:
                return False
            if step is None:
                self.steps += 1
                self.step = 1 if self.step is None else self.step + 1
            else:
                self.steps += 0 if self.step is None else max(0, step - self.step)
                self.step = step
            return True

    def begin(self, step: int) -> None:
        """Set the step that holds until a source advances it; no effect if the clock is owned."""
        with self._lock:
            if self.owner is None:
                self.step = step

    def let_go(self) -> None:
        """Unset the step if no source owns the clock, such as one left by an ended tracker."""
        with self._lock:
            if self.owner is None:
                self.step = None

    def restart(self) -> None:
        """Reset step and owner."""
        with self._lock:
            self.step = self.owner = None

    def release(self, owner: str) -> None:
        """Let another source own the clock from now on."""
        with self._lock:
            if self.owner == owner:
                self.owner = None
