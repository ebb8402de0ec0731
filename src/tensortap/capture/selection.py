"""The training step, and call counters per name that decide `every`, `first` and `changed`.

Nothing here has a lock: each statement that changes a count or a step is one that no other thread
and no signal handler interrupts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from tensortap.core.arguments import check_text


class Clock:
    """The training step; the first source to advance the clock owns it."""

    __slots__ = ("_begun", "owner", "step", "stepping", "steps")

    def __init__(self) -> None:
        self.step: int | None = None
        self.owner: str | None = None
        self.steps = 0  # how many steps have passed, whatever their numbers
        self.stepping = 0.0  # seconds that they took; the first is not known
        self._begun: float | None = None

    def advance(self, owner: str, step: int | None = None) -> bool:
        """Go to the next step, or to `step`; return False if another source owns the clock."""
        if self.owner is None:
            self.owner = owner
        elif self.owner != owner:
            return False
        if step is None:
            step = 1 if self.step is None else self.step + 1
            passed = 1
        else:
            passed = 0 if self.step is None else max(0, step - self.step)
        self.step = step
        self.steps += passed
        now = time.perf_counter()
        if self._begun is not None:
            self.stepping += now - self._begun
        self._begun = now
        return True

    def begin(self, step: int) -> None:
        """Set the step that holds until a source advances it; no effect if the clock is owned."""
        if self.owner is None:
            self.step = step

    def let_go(self) -> None:
        """Unset the step if no source owns the clock, such as one left by an ended tracker."""
        if self.owner is None:
            self.step = None

    def restart(self) -> None:
        """Reset step and owner."""
        self.step = self.owner = self._begun = None

    def release(self, owner: str) -> None:
        """Let another source own the clock from now on."""
        if self.owner == owner:
            self.owner = None


class CallCounter:
    """Counts the calls under one name and knows which call was the first of the current step.

    `tick` is one atomic C call. A skipped call pays for nothing else.
    """

    __slots__ = (
        "_before", "_count", "base", "digest", "name", "sparse", "step", "tick", "until",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self._before = 0
        self._count = itertools.count()
        self.sparse = 1  # a session may want each n-th of the calls that are selected; 0: none
        self.until: int | None = None  # the step from which it no longer does
        self.restart()

    def restart(self) -> None:
        """Count from zero again."""
        self._before = self.calls
        self._count = itertools.count()
        self.tick: Callable[[], int] = self._count.__next__
        self.step: int | None = None
        self.base = 0
        self.digest: bytes | None = None

    def begin(self, number: int, step: int | None) -> None:
        """Make call `number` the first one under this name in `step`."""
        self.step = step
        self.base = number

    def skips(self, nth: int) -> bool:
        """Return whether a session has switched off the `nth` call that is selected."""
        if self.until is not None and self.step is not None and self.step >= self.until:
            self.sparse, self.until = 1, None
        return not self.sparse or nth % self.sparse > 0

    def count(self, step: int | None) -> tuple[int, int]:
        """Count a call in `step`; return its step and which call it is within the step."""
        number = self.tick()
        if self.step != step:
            self.begin(number, step)
        return self.position(number)

    def position(self, number: int) -> tuple[int, int]:
        """Return step and call of call `number`; without a training step, calls count as steps."""
        return (number, 0) if self.step is None else (self.step, number - self.base)

    @property
    def calls(self) -> int:
        """Number of calls, captured or not."""
        return self._before + count_of(self._count)

    def differs(self, digest: bytes) -> bool:
        """Return whether the digest differs from the last captured one, and remember it."""
        last, self.digest = self.digest, digest
        return digest != last


class CallCounters(dict[str, CallCounter]):
    def of(self, name: str) -> CallCounter:
        """Return the counter of a name; create it at the first call."""
        counter = self.get(name)
        if counter is None:
            check_text("name", name)
            if not name:
                raise ValueError("name must not be empty")
            counter = self.setdefault(name, CallCounter(name))
        return counter


def count_of(counter: itertools.count[int]) -> int:
    """Return how often a counter was advanced; its repr is all that does not advance it."""
    return int(repr(counter)[6:-1])


def seconds_per_skip() -> float:
    """Return how long a skipped call takes, measured now."""
    counter, rounds = CallCounter("cost"), 2000
    start = time.perf_counter_ns()
    for _ in range(rounds):
        if counter.tick() % 7 and counter.step != 1:
            continue
    return (time.perf_counter_ns() - start) / rounds / 1e9
