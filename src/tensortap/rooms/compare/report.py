"""The result of comparing two runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.core.errors import TensortapError
from tensortap.core.record import Blob, Fields, Items, Mapping, Number, TensorData
from tensortap.rooms.compare.result import FORMAT, Comparison, figures_of
from tensortap.text.json_values import as_json
from tensortap.values.rebuild import rebuild

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class Key:
    """Identifies a record in both runs. Rank -1 means assembled from shards."""

    name: str
    kind: str
    step: int
    call: int
    rank: int

    @property
    def place(self) -> tuple[str, str, int, int]:
        """Everything but the rank."""
        return self.name, self.kind, self.step, self.call

    def __str__(self) -> str:
        call = f" call {self.call}" if self.call else ""
        rank = "all ranks" if self.rank < 0 else f"rank {self.rank}"
        return f"{self.name}  {self.kind}  step {self.step}{call}  {rank}"


@dataclass(frozen=True, slots=True)
class Difference:
    """A record that differs between two runs."""

    key: Key
    comparison: Comparison
    by: str = "value"  # or "statistics" if one run has nothing else
    explanations: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.key}  {self.comparison.line}"
        if self.by != "value":
            text += f"  (by {self.by})"
        return text + "".join(f"\n  {explanation}" for explanation in self.explanations)

    def to_json(self) -> dict[str, Any]:
        """Return the difference as JSON."""
        return {
            **asdict(self.key),
            "by": self.by,
            "explanations": list(self.explanations),
            "comparison": figures_of(self.comparison),
        }


@dataclass(frozen=True, slots=True)
class Missing:
    """A record that only one run has; `dropped` says that the other run dropped it."""

    key: Key
    side: str  # "a" or "b": the run that has it
    dropped: bool = False


def missing_rows(missing: Iterable[Missing]) -> list[tuple[str, ...]]:
    """Return name, kind, number of records, steps, ranks, and which run lacks them, as texts.

    >>> keys = [Key("head", "Weight", step, 0, 0) for step in (3, 4)]
    >>> missing_rows(Missing(key, "a") for key in keys)
    [('head', 'Weight', '2', 'steps 3-4', '0', 'only in the first')]
    """
    found: dict[tuple[str, str, str], list[Missing]] = {}
    for each in missing:
        found.setdefault((each.side, each.key.name, each.key.kind), []).append(each)
    rows: list[tuple[str, ...]] = []
    for (side, name, kind), own in sorted(found.items(), key=lambda each: each[0][0]):
        steps, ranks = (sorted({getattr(m.key, a) for m in own}) for a in ("step", "rank"))
        span = f"steps {steps[0]}-{steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
        on = ", ".join("all" if rank < 0 else str(rank) for rank in ranks[:4])
        on += ", …" if len(ranks) > 4 else ""
        lacks = f"only in the {'first' if side == 'a' else 'second'}"
        if dropped := sum(each.dropped for each in own):
            lacks += f"; the other dropped {dropped:,}"
        rows.append((name, kind, f"{len(own):,}", span, on, lacks))
    return rows


@dataclass(frozen=True)
class CompareReport:
    """The result of comparing two runs; true if they agree."""

    a: str
    b: str
    compared: int
    equal: int  # equal bytes
    by_statistics: int
    differences: tuple[Difference, ...] = ()  # in the order of execution
    missing: tuple[Missing, ...] = ()
    ignored: int = 0
    allow_missing: bool = False
    provenance: dict[str, Any] = field(default_factory=dict)
    culprit: str = ""
    # the largest relative difference by name, kind and step, in the order of execution
    sizes: Callable[[], dict[tuple[str, str, int], float]] = field(
        default=dict, repr=False, compare=False
    )
    # reads the two values of a difference on demand, as they are stored
    look: Callable[[Key], tuple[Any, Any]] | None = field(default=None, repr=False, compare=False)
    first_bitwise: Difference | None = None  # whose bits differ first, within tolerance or not
    atol: float = 0.0
    rtol: float = 0.0
    unplaced: tuple[Key, ...] = ()  # not compared: their layout on the ranks is unknown
    ranks: tuple[int, ...] = ()  # whose part of the first difference is wrong, if that is known

    def __bool__(self) -> bool:
        return not self.differences and (self.allow_missing or not self.missing)

    @property
    def first(self) -> Difference | None:
        """Return the first difference in the order of execution."""
        return next(iter(self.differences), None)

    @property
    def bitwise_text(self) -> str:
        """Return where the bits begin to differ, in words; empty if `first` says it already."""
        found, first = self.first_bitwise, self.first
        if found is None or (first is not None and first.key == found.key):
            return ""
        within = "within the tolerance, " if found.comparison else ""
        return "; ".join([f"{found.key}  {within}{found.comparison.line}", *found.explanations])

    def values(self, difference: Difference) -> tuple[Any, Any]:
        """Read both values of a difference from the runs: ``report.values(report.first)``."""
        if self.look is None:
            raise TensortapError("this report cannot read the values: it was not made from runs")
        a, b = self.look(difference.key)
        return _rebuilt(a), _rebuilt(b)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON; docs/compare.md is the specification."""
        plain = (
            "a", "b", "compared", "equal", "by_statistics", "ignored", "allow_missing", "culprit",
            "atol", "rtol",
        )  # fmt: skip
        pairs = self.provenance.items()
        return {
            "format": FORMAT,
            "of": "runs",
            "agree": bool(self),
            **{name: getattr(self, name) for name in plain},
            "provenance": {name: {"a": as_json(a), "b": as_json(b)} for name, (a, b) in pairs},
            "first": None if self.first is None else self.first.to_json(),
            "ranks": list(self.ranks),
            "first_bitwise": None if self.first_bitwise is None else self.first_bitwise.to_json(),
            "unplaced": [asdict(key) for key in self.unplaced],
            "differences": [each.to_json() for each in self.differences],
            "missing": [
                {**asdict(each.key), "only_in": each.side, "dropped": each.dropped}
                for each in self.missing
            ],
        }

    def write_html(self, path: str | Path) -> Path:
        """Write one self-contained HTML file."""
        from tensortap.rooms.compare.html import write_html

        return write_html(self, path)

    def __rich__(self) -> RenderableType:
        from tensortap.rooms.compare.text import report_text

        return report_text(self)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        from tensortap.rooms.compare.text import report_as_plain_text

        return report_as_plain_text(self)

    @property
    def counted(self) -> list[tuple[int, str]]:
        """Return what else there is beside the compared records: numbers and words."""
        counts = (
            (self.by_statistics, "by their statistics only"),
            (len(self.differences), "differ"),
            (sum(m.side == "a" for m in self.missing), "only in the first"),
            (sum(m.side == "b" for m in self.missing), "only in the second"),
            (self.ignored, "ignored"),
            (len(self.unplaced), "not compared, as their layout on the ranks is unknown"),
        )
        return [(number, words) for number, words in counts if number]

    @property
    def counts(self) -> str:
        """Return the counts of records in words."""
        more = [f"{number:,} {words}" for number, words in self.counted]
        return ", ".join([f"{self.compared:,} records compared", *more])


def _rebuilt(value: Any) -> Any:
    neutral = isinstance(value, (TensorData, Number, Blob, Fields, Items, Mapping))
    return rebuild(value) if neutral else value
