"""What is captured and what is passed over, decided before anything is copied."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from tensortap.errors import TensortapError
from tensortap.record import Kind, Record


def fits(record: Record, step: int | None, rank: int | None, kind: Kind | None) -> bool:
    """Whether a record is one of those that are asked for."""
    return (
        (step is None or record.step == step)
        and (rank is None or record.rank == rank)
        and (kind is None or record.kind is kind)
    )


class Gate:
    """The calls under one name: how many there were, and which of them this step's first is.

    `tick` is one C call and atomic: it is all that a skipped call pays.
    """

    __slots__ = ("_before", "_count", "base", "digest", "lock", "name", "step", "tick")

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()
        self._before = 0
        self._count = itertools.count()
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
        """Call `number` is the first one under this name in `step`."""
        self.step = step
        self.base = number

    @property
    def calls(self) -> int:
        """How many calls there were, taken or not."""
        # "count(12)": the only look that consumes nothing
        return self._before + int(repr(self._count)[6:-1])

    def differs(self, digest: bytes) -> bool:
        """Whether the content is another one than when it was last kept; it is kept now."""
        with self.lock:
            if digest == self.digest:
                return False
            self.digest = digest
            return True


class Gates(dict[str, Gate]):
    """Name → gate; a new name gets one, and `on_new` is told: a place for rare checks."""

    on_new: Callable[[], None] | None = None

    def __missing__(self, name: str) -> Gate:
        if not isinstance(name, str):
            raise TypeError(f"a name is a string, not {name!r}")
        if not name:
            raise ValueError("a name has at least one character")
        if self.on_new is not None:
            self.on_new()
        return self.setdefault(name, Gate(name))


class Clock:
    """The training step: one axis for all sources; whoever advances it first owns it."""

    __slots__ = ("_lock", "owner", "step")

    def __init__(self) -> None:
        self.step: int | None = None
        self.owner: str | None = None
        self._lock = threading.Lock()

    def advance(self, owner: str, step: int | None = None) -> bool:
        """Go to the next step, or to `step`; False when somebody else owns the clock."""
        with self._lock:
            if self.owner is None:
                self.owner = owner
            elif self.owner != owner:
                return False
            if step is None:
                self.step = 1 if self.step is None else self.step + 1
            else:
                self.step = step
            return True

    def begin(self, step: int) -> None:
        """The step that holds until somebody advances it; whoever owns the clock knows better."""
        with self._lock:
            if self.owner is None:
                self.step = step

    def let_go(self) -> None:
        """Forget a step that nobody advances any more: what an ended tracker has left."""
        with self._lock:
            if self.owner is None:
                self.step = None

    def restart(self) -> None:
        """As if nobody had ever advanced it."""
        with self._lock:
            self.step = self.owner = None

    def release(self, owner: str) -> None:
        """Let another source own the clock from here on."""
        with self._lock:
            if self.owner == owner:
                self.owner = None


def parse_steps(text: str | None) -> tuple[int | None, int | None] | None:
    """The first and the last step of ``10:20``, ``10:``, ``:20`` or ``10``; None is all.

    >>> parse_steps("10:20"), parse_steps(":20"), parse_steps("7"), parse_steps("")
    ((10, 20), (None, 20), (7, 7), None)
    """
    if not text:
        return None
    first, colon, last = text.partition(":")
    try:
        low = int(first) if first else None
        high = (int(last) if last else None) if colon else low
    except ValueError:
        raise TensortapError(f"steps are like 10:20, not {text!r}") from None
    if low is not None and high is not None and low > high:
        raise TensortapError(f"steps {text}: there is no step between them")
    return low, high
