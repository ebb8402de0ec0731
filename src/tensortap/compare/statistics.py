"""Two records of which at least one has statistics only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tensortap.compare.result import Comparison
from tensortap.compare.sides import Part, Side
from tensortap.frameworks.view import as_numpy
from tensortap.record import Summary, TensorData
from tensortap.stats import merge, summarize_array

if TYPE_CHECKING:
    from tensortap.compare.runs import Tolerance

_COUNTS = ("count", "nans", "posinfs", "neginfs")
_FIGURES = ("min", "max", "mean", "std", "mean_abs", "max_abs", "min_abs", "rm2", "rm4", "rm8")


def compare_statistics(
    sides: tuple[Side, Side], a: list[Part], b: list[Part], tolerance: Tolerance
) -> Comparison:
    """Whether the statistics agree: counts exactly, figures within the tolerance.

    The mean, which may be nothing against the values it is the mean of, is measured by theirs.
    """
    found = [_summary(side, parts) for side, parts in zip(sides, (a, b), strict=True)]
    if found[0] is None or found[1] is None:
        return Comparison(False, "nothing to compare: no value and no statistics", differing=1)
    one, other = found[0], found[1]
    worst_abs = worst_rel = 0.0
    differ = [
        f"{name} {getattr(one, name):,} and {getattr(other, name):,}"
        for name in _COUNTS
        if getattr(one, name) != getattr(other, name)
    ]
    for name in _FIGURES:
        x, y = getattr(one, name), getattr(other, name)
        if math.isnan(x) and math.isnan(y):
            continue
        scale = max(abs(other.mean_abs), abs(y)) if name in ("mean", "std") else abs(y)
        size = abs(x - y)
        worst_abs = max(worst_abs, size)
        worst_rel = max(worst_rel, size / scale if scale else (math.inf if size else 0.0))
        if not size <= tolerance.atol + tolerance.rtol * scale:
            differ.append(f"{name} {x:.6g} and {y:.6g}")
    return Comparison(
        not differ, f"statistics differ: {', '.join(differ[:3])}" if differ else "",
        notes=("by statistics",), count=one.count, max_abs=worst_abs, max_rel=worst_rel,
        differing=int(bool(differ)),
    )  # fmt: skip


def _summary(side: Side, parts: list[Part]) -> Summary | None:
    """The statistics of a tensor, or of all its shards together."""
    found = []
    for part in parts:
        stats = part.record.stats
        if stats is None:
            value = side.value(part)
            if not isinstance(value, TensorData):
                return None
            stats = summarize_array(as_numpy(value))
        found.append(stats)
    return found[0] if len(found) == 1 else merge(*found)
