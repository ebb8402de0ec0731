"""Compare two records of which at least one has only statistics."""

from __future__ import annotations

import math

from tensortap.compare.compared_run import ComparedRun, RecordPart
from tensortap.compare.result import Comparison
from tensortap.compare.tensors import Tolerance
from tensortap.frameworks.view import as_numpy
from tensortap.record import Summary, TensorData
from tensortap.stats import summarize_array
from tensortap.stats.merge import merge

_COUNTS = ("count", "nans", "posinfs", "neginfs")
_FIGURES = ("min", "max", "mean", "std", "mean_abs", "max_abs", "min_abs", "rm2", "rm4", "rm8")


def compare_statistics(
    sides: tuple[ComparedRun, ComparedRun],
    a: list[RecordPart],
    b: list[RecordPart],
    tolerance: Tolerance,
) -> Comparison:
    """Compare statistics: counts exactly, figures within the tolerance.

    The tolerance of the mean is relative to the values, because the mean may be near zero. What
    differs in the numbers of NaN and infinities is `nonfinite`, as no figure measures it.
    """
    found = [_summary(side, parts) for side, parts in zip(sides, (a, b), strict=True)]
    if found[0] is None or found[1] is None:
        return Comparison(False, "nothing to compare: neither value nor statistics", differing=1)
    one, other = found[0], found[1]
    max_abs = max_rel = 0.0
    differ = []
    nonfinite = 0
    for name in _COUNTS:
        x, y = getattr(one, name), getattr(other, name)
        if x != y:
            differ.append(f"{name} {x:,} and {y:,}")
            nonfinite += abs(x - y) if name != "count" else 0
    for name in _FIGURES:
        x, y = getattr(one, name), getattr(other, name)
        if math.isnan(x) and math.isnan(y):
            continue
        scale = max(abs(other.mean_abs), abs(y)) if name in ("mean", "std") else abs(y)
        size = abs(x - y)
        max_abs = max(max_abs, size)
        max_rel = max(max_rel, size / scale if scale else (math.inf if size else 0.0))
        if not size <= tolerance.atol + tolerance.rtol * scale:
            differ.append(f"{name} {x:.6g} and {y:.6g}")
    return Comparison(
        not differ, f"statistics differ: {', '.join(differ[:3])}" if differ else "",
        notes=("by statistics",), count=one.count, nonfinite=nonfinite, max_abs=max_abs,
        max_rel=max_rel, differing=int(bool(differ)),
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
