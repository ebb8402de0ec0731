"""The receipt: what tensortap captured in this process and what it cost."""

from __future__ import annotations

import dataclasses
import html
from typing import Any

from tensortap.core.limits import format_size


@dataclasses.dataclass(frozen=True, slots=True)
class Receipt:
    """Counts of captured and lost values, with reasons, and the cost to the training thread."""

    captured: int  # values that were copied and not dropped afterwards
    tracked: int  # tensors whose statistics were computed
    skipped: int  # calls that the selection left out
    dropped: int  # values that did not arrive, for any of the `reasons`
    reasons: dict[str, int]  # over budget, disconnected, error, too large, busy
    bytes: int
    steps: int
    seconds: float  # in the training thread
    seconds_per_step: float
    activities: dict[str, float]  # seconds by activity
    sessions: dict[str, str]  # address → state of each live session
    stepping: float = 0.0  # seconds that these steps took in all, tensortap included
    memory: int = 0  # bytes that tensortap takes for values on their way

    @property
    def share(self) -> float:
        """The share of the steps that tensortap took in the training thread; 0 if not known.

        Connecting does not count: it happens once, in most programs before the first step ends.
        """
        seconds = self.seconds - self.activities.get("connecting", 0.0)
        return min(1.0, seconds / self.stepping) if self.stepping else 0.0

    def since(self, earlier: Receipt) -> Receipt:
        """Return what was added since an earlier receipt."""
        counts = ("captured", "tracked", "skipped", "dropped", "bytes", "steps", "stepping")
        added: dict[str, Any] = {
            name: max(0, getattr(self, name) - getattr(earlier, name)) for name in counts
        }
        for name in ("reasons", "activities"):
            before = getattr(earlier, name)
            now = getattr(self, name).items()
            added[name] = {key: max(0, each - before.get(key, 0)) for key, each in now}
        seconds = added["seconds"] = sum(added["activities"].values())
        added["seconds_per_step"] = seconds / added["steps"] if added["steps"] else 0.0
        return dataclasses.replace(self, **added)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        tracked = f", {self.tracked:,} tracked" if self.tracked else ""
        reasons = ", ".join(f"{count:,} {why}" for why, count in self.reasons.items() if count)
        steps = (
            f", {format_seconds(self.seconds_per_step)} per step over {self.steps:,} steps"
            if self.steps
            else ""
        )
        share = f" ({self.share:.2%} of their time)" if self.share else ""
        largest_first = sorted(self.activities.items(), key=lambda item: -item[1])
        activities = [f"{name} {format_seconds(s)}" for name, s in largest_first if s > 0]
        lines = [
            f"tensortap receipt: {self.captured:,} captured ({format_size(self.bytes)}){tracked}, "
            f"{self.skipped:,} skipped, {self.dropped:,} dropped" + (reasons and f" ({reasons})"),
            f"  training thread: {format_seconds(self.seconds)}{steps}{share}",
            f"  spent on: {', '.join(activities) or 'nothing'}",
        ]
        if self.memory:
            lines.append(f"  memory for values on their way: {format_size(self.memory)}")
        lines.extend(f"  live session {where}: {state}" for where, state in self.sessions.items())
        return "\n".join(lines)


def format_seconds(seconds: float) -> str:
    """Return a duration as people read it."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"
