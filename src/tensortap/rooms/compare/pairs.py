"""Compare one pair of records: by value, by digest, or by statistics."""

from __future__ import annotations

import filecmp
import math
from typing import Any, NamedTuple

from tensortap.core.errors import UntrustedFile
from tensortap.core.record import Summary, TensorData
from tensortap.rooms.compare.compared_run import ComparedRun, RecordPart, batch_of, whole
from tensortap.rooms.compare.plan import RecordPair
from tensortap.rooms.compare.result import Comparison
from tensortap.rooms.compare.tensors import Tolerance, nudged
from tensortap.rooms.compare.values import compare_with
from tensortap.runs.assemble import Disagreement
from tensortap.stats import summarize_array
from tensortap.stats.merge import merge
from tensortap.stats.shard_digest import add_digests, is_shard_digest
from tensortap.values.view import as_numpy

Sides = tuple[ComparedRun, ComparedRun]

_COUNTS = ("count", "nans", "posinfs", "neginfs")
_FIGURES = ("min", "max", "mean", "std", "mean_abs", "max_abs", "min_abs", "rm2", "rm4", "rm8")


class Outcome(NamedTuple):
    """The result of comparing one pair of records."""

    comparison: Comparison
    by: str = "value"

    @property
    def size(self) -> float:
        """The relative size of the difference."""
        found = self.comparison
        return found.max_rel if found.rel_l2 is None else found.rel_l2

    def identical(self, item: RecordPair) -> bool:
        """Return whether both values have the same bits, as far as the runs tell."""
        one, other = (parts[0].record for parts in (item.a, item.b))
        if len(item.a) == len(item.b) == 1 and one.digest and other.digest:
            return one.digest == other.digest and one.dtype == other.dtype
        found = self.comparison
        return found.equal and not found.max_abs and not found.mismatches


def compare_pair(sides: Sides, item: RecordPair) -> Outcome:
    """Compare two records, or tensors of which ranks have parts."""
    tolerance = item.tolerance
    held = [all(part.has_value for part in parts) for parts in (item.a, item.b)]
    batches = [{batch_of(part.record) for part in parts} for parts in (item.a, item.b)]
    # parts of a batch may be in any order, which does not matter to statistics
    has_parts = max(map(len, batches)) > 1
    if not all(held) or has_parts:
        same = _same_digests(item) if tolerance.equal_nan and not has_parts else None
        if same:
            return Outcome(Comparison(True, notes=("by digest",)))
        if same is False and not (tolerance.atol or tolerance.rtol):
            return Outcome(Comparison(False, "the bits differ, by digest", differing=1), "digest")
        return Outcome(_compare_statistics(sides, item.a, item.b, tolerance), "statistics")
    try:
        a, b = whole(sides[0], item.a), whole(sides[1], item.b)
    except Disagreement as error:
        return Outcome(Comparison(False, str(error), differing=1))
    except UntrustedFile as error:  # one unreadable object must not end the comparison
        if _same_bytes(sides, item):
            return Outcome(Comparison(True, notes=("not read: the files have equal bytes",)))
        return Outcome(Comparison(False, str(error), differing=1))
    if a is None and b is None and item.a[0].record.stats is not None:
        # a live session reveals only now that it has no value
        return Outcome(_compare_statistics(sides, item.a, item.b, tolerance), "statistics")
    return Outcome(compare_with(a, b, tolerance))


def _same_bytes(sides: Sides, item: RecordPair) -> bool:
    """Return whether a pair of dumped objects has files with equal bytes."""
    if len(item.a) != 1 or len(item.b) != 1:
        return False
    a, b = sides[0].file(item.a[0]), sides[1].file(item.b[0])
    # a pipe equals nothing
    return a is not None and b is not None and filecmp.cmp(a, b, shallow=False)


def _same_digests(item: RecordPair) -> bool | None:
    """Return whether both tensors have the same bits; None if their digests do not tell."""
    totals = []
    for parts in (item.a, item.b):
        found: dict[Any, tuple[int, bytes]] = {}  # by place: replicas count once
        for part in parts:
            record = part.record
            if record.digest is None or not is_shard_digest(record.digest):
                return None
            place = record.shard.offsets if record.shard is not None else None
            size = math.prod(record.shape)
            if found.setdefault(place, (size, record.digest)) != (size, record.digest):
                return None  # replicas differ
        shard = parts[0].record.shard
        whole = math.prod(shard.global_shape if shard is not None else parts[0].record.shape)
        if sum(size for size, _ in found.values()) != whole:
            return None  # shards are missing
        totals.append(add_digests(digest for _, digest in found.values()))
    return totals[0] == totals[1]


def _compare_statistics(
    sides: Sides, a: list[RecordPart], b: list[RecordPart], tolerance: Tolerance
) -> Comparison:
    """Compare statistics: counts exactly, figures within the tolerance.

    The tolerance of the mean is relative to the values, because the mean may be near zero. What
    differs in the numbers of NaN and infinities is `nonfinite`, as no figure measures it.
    """
    try:
        found = [_summary(side, parts) for side, parts in zip(sides, (a, b), strict=True)]
    except Disagreement as error:
        return Comparison(False, str(error), notes=("by statistics",), differing=1)
    if found[0] is None or found[1] is None:
        return Comparison(False, "nothing to compare: neither value nor statistics", differing=1)
    one, other = found[0], found[1]
    max_abs = max_rel = 0.0
    differ = []
    nonfinite = 0
    excess: float | None = 0.0
    for name in _COUNTS:
        x, y = getattr(one, name), getattr(other, name)
        if x != y:
            differ.append(f"{name} {x:,} and {y:,}")
            nonfinite += abs(x - y) if name != "count" else 0
            excess = None
    for name in _FIGURES:
        x, y = getattr(one, name), getattr(other, name)
        if math.isnan(x) and math.isnan(y):
            continue
        scale = max(abs(other.mean_abs), abs(y)) if name in ("mean", "std") else abs(y)
        size = abs(x - y)
        max_abs = max(max_abs, size)
        max_rel = max(max_rel, size / scale if scale else (math.inf if size else 0.0))
        if excess is not None:
            excess = max(excess, size - tolerance.rtol * scale)
        if not size <= tolerance.atol + tolerance.rtol * scale:
            differ.append(f"{name} {x:.6g} and {y:.6g}")
    return Comparison(
        not differ, f"statistics differ: {', '.join(differ[:3])}" if differ else "",
        notes=("by statistics",), count=one.count, nonfinite=nonfinite, max_abs=max_abs,
        max_rel=max_rel, differing=int(bool(differ)), passing_atol=excess and nudged(excess),
    )  # fmt: skip


def _summary(side: ComparedRun, parts: list[RecordPart]) -> Summary | None:
    """Return the statistics of a tensor, merged over its shards; replicas count once."""
    found: dict[Any, tuple[int, Summary]] = {}
    for part in parts:
        stats = part.record.stats
        if stats is None:
            value = side.value(part)
            if not isinstance(value, TensorData):
                return None
            stats = summarize_array(as_numpy(value))
        record = part.record
        place: Any = (record.shape, record.shard.offsets) if record.shard is not None else None
        if len(parts) > 1:
            place = batch_of(record), place
        rank, known = found.setdefault(place, (record.rank, stats))
        if repr(known) != repr(stats):  # NaN does not equal itself
            raise Disagreement(f"the replicas of ranks {rank} and {record.rank} differ")
    summaries = [stats for _, stats in found.values()]
    return summaries[0] if len(summaries) == 1 else merge(*summaries)
