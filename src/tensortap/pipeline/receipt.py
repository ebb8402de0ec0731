"""What tensortap has done in this process and what it cost."""

from __future__ import annotations

import dataclasses

from tensortap.limits import format_size


@dataclasses.dataclass(frozen=True, slots=True)
class Receipt:
    """The bill: what was taken, what was not and why, and the time training paid for it."""

    captured: int  # values that were copied and handed on
    tracked: int  # tensors whose statistics were taken
    skipped: int  # calls that the selection passed over
    dropped: int  # values that found no room, or made room for newer ones
    unheard: int  # values that nobody listened for
    failed: int  # values that were on their way and got lost
    errors: int  # values that could not be caught
    bytes: int
    steps: int
    seconds: float  # in the training thread
    seconds_per_step: float
    where: dict[str, float]  # seconds by what they were spent on
    sessions: dict[str, str]  # address → state of each live session

    def since(self, before: Receipt) -> Receipt:
        """What has come on top of an earlier one."""
        counts = "captured tracked skipped dropped unheard failed errors bytes steps".split()
        more = {name: max(0, getattr(self, name) - getattr(before, name)) for name in counts}
        where = {name: s - before.where.get(name, 0.0) for name, s in self.where.items()}
        where = {name: max(0.0, seconds) for name, seconds in where.items()}
        seconds = sum(where.values())
        each = seconds / more["steps"] if more["steps"] else 0.0
        return dataclasses.replace(
            self, **more, where=where, seconds=seconds, seconds_per_step=each
        )

    def __str__(self) -> str:
        captured = f"{self.captured:,} captured ({format_size(self.bytes)})"
        tracked = f", {self.tracked:,} tracked" if self.tracked else ""
        lines = [f"tensortap receipt: {captured}, {self.skipped:,} skipped{tracked}"]
        lost = [
            (self.dropped, "dropped over budget"),
            (self.unheard, "with nobody listening"),
            (self.failed, "lost on the way"),
            (self.errors, "could not be caught"),
        ]
        lines.append("  not kept: " + (", ".join(f"{n:,} {w}" for n, w in lost if n) or "nothing"))
        step = f", {_time(self.seconds_per_step)} a step over {self.steps:,} steps"
        lines.append(f"  training thread: {_time(self.seconds)} in all{step if self.steps else ''}")
        where = sorted(self.where.items(), key=lambda item: -item[1])
        spent = ", ".join(f"{name} {_time(seconds)}" for name, seconds in where if seconds > 0)
        lines.append(f"  spent on: {spent or 'nothing'}")
        lines.extend(f"  live session {where}: {state}" for where, state in self.sessions.items())
        return "\n".join(lines)


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"
