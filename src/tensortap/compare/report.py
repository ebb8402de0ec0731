"""What the comparison of two runs found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tensortap.compare.result import Comparison


@dataclass(frozen=True, slots=True)
class Key:
    """Which record: what both sides have in common. Rank -1: put together from shards."""

    name: str
    kind: str
    step: int
    call: int
    rank: int

    def __str__(self) -> str:
        call = f" call {self.call}" if self.call else ""
        rank = "all ranks" if self.rank < 0 else f"rank {self.rank}"
        return f"{self.name}  {self.kind}  step {self.step}{call}  {rank}"


@dataclass(frozen=True, slots=True)
class Difference:
    """A record that the two runs do not agree on."""

    key: Key
    comparison: Comparison
    by: str = "value"  # or "statistics", where that is all there is of one side
    explanations: tuple[str, ...] = ()
    expected: str = ""  # why a rule says that this was to be expected
    rule: str = ""  # what it was judged by, if not the tolerance

    def __str__(self) -> str:
        text = f"{self.key}  {self.comparison.line}"
        if self.by != "value":
            text += f"  (by {self.by})"
        return text + "".join(f"\n  {explanation}" for explanation in self.explanations)


@dataclass(frozen=True, slots=True)
class Missing:
    """A record that only one run has; `dropped`: the other had no room for it."""

    key: Key
    side: str  # "a" or "b": who has it
    dropped: bool = False


@dataclass(frozen=True)
class Report:
    """Whether two runs agree; true or false by itself."""

    a: str
    b: str
    compared: int
    equal: int  # the same bytes
    by_statistics: int
    differences: tuple[Difference, ...] = ()  # in the order of execution
    missing: tuple[Missing, ...] = ()
    ignored: int = 0
    allow_missing: bool = False
    provenance: dict[str, Any] = field(default_factory=dict)
    culprit: str = ""
    _looked_at: dict[tuple[str, str, int], float] = field(default_factory=dict, repr=False)
    _calm: Any = field(default=None, repr=False)  # a table and its rows of equal records

    def __bool__(self) -> bool:
        if any(not difference.expected for difference in self.differences):
            return False
        return self.allow_missing or not self.missing

    @property
    def worst(self) -> dict[tuple[str, str, int], float]:
        """(name, kind, step) → the largest relative difference: what a timeline is drawn from."""
        found: dict[tuple[str, str, int], float] = {}
        if self._calm is not None:
            import pyarrow as pa

            table, rows = self._calm
            columns = [table.column(i).take(pa.array(rows)).to_pylist() for i in range(3)]
            found = dict.fromkeys(zip(*columns, strict=True), 0.0)
        return {**found, **self._looked_at}

    @property
    def first(self) -> Difference | None:
        """The first difference that was not expected, in the order of execution."""
        return next((d for d in self.differences if not d.expected), None)

    def __str__(self) -> str:
        lines = [f"{self.a} and {self.b} {'agree' if self else 'differ'}: {self._counts()}"]
        if self.first is not None:
            lines.append(f"first: {self.first}")
        if self.culprit:
            lines.append(self.culprit)
        return "\n".join(lines)

    def _counts(self) -> str:
        said = [f"{self.compared:,} records compared"]
        for number, text in (
            (self.by_statistics, "by their statistics only"),
            (len(self.differences), "differ"),
            (sum(bool(d.expected) for d in self.differences), "of them as expected"),
            (sum(m.side == "a" for m in self.missing), "only in the first"),
            (sum(m.side == "b" for m in self.missing), "only in the second"),
            (self.ignored, "ignored"),
        ):
            if number:
                said.append(f"{number:,} {text}")
        return ", ".join(said)
