"""Compare two records of which at least one has only statistics."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tensortap.compare.compared_run import ComparedRun, RecordPart
from tensortap.compare.result import Comparison
from tensortap.frameworks.view import as_numpy
from tensortap.record import Summary, TensorData
from tensortap.stats import merge, summarize_array

if TYPE_CHECKING:
    from tensortap.compare.runs import Tolerance

_COUNTS = ("count", "nans", "posinfs", "neginfs")
_FIGURES = ("min", "max", "mean", "std", "mean_abs", "max_abs", "min_abs", "rm2", "rm4", "rm8")


def compare_statistics(
    sides: tuple[ComparedRun, ComparedRun],
    a: list[RecordPart],
    b: list[RecordPart],
    tolerance: Tolerance,
) -> Comparison:
    """Compare statistics: counts exactly, figures within the tolerance.

    The tolerance of the mean is relative to the values, because the mean may be near zero.
    """
    found = [_summary(side, parts) for side, parts in zip(sides, (a, b), strict=True)]
    if found[0] is None or found[1] is None:
        return Comparison(False, "nothing to compare: neither value nor statistics", differing=1)
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


def _summary(side: ComparedRun, parts: list[RecordPart]) -> Summary | None:
    """Return the statistics of a tensor, merged over its shards."""
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
