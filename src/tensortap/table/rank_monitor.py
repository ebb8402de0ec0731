"""Alerts about ranks: tensors that are far from those of other ranks, ranks that fall behind.

A `RankMonitor` gets the statistics of all ranks step by step: in a live session as they arrive,
of a run when it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.alerts import Alert
from tensortap.alerts.alert import module_of
from tensortap.alerts.rank_rules import RankLimits
from tensortap.record import Kind, Record
from tensortap.table.mesh import MeshLayout, parse_mesh
from tensortap.table.ranks import deviations

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

PARAMETERS = (Kind.WEIGHT, Kind.WEIGHT_GRADIENT, Kind.OPTIMISER_STATE)
COMPARED = (Kind.ACTIVATION, Kind.GRADIENT, *PARAMETERS, Kind.METRIC)
KEPT_STEPS = 1024  # of which is known when ranks reached them
# dimensions of a mesh along which ranks do the same with other batches
_ALIKE = re.compile(r".*dp|data|batch|replicate|shard|cp|context")
_UNNAMED = re.compile(r"dim\d+")
Tensor = tuple[Kind, str]


class StepStatistics(NamedTuple):
    """A statistic of all tensors of a step: one row per rank, one column per tensor."""

    step: int
    ranks: list[int]
    tensors: list[Tensor]  # in the order of capture
    value: Floats  # NaN where there is no record
    nonfinite: NDArray[np.bool_]


class RankMonitor:
    """Compares ranks step by step; each problem of a rank is reported once while it lasts."""

    def __init__(self, limits: RankLimits | None = None) -> None:
        self.limits = limits or RankLimits()
        self.groups: dict[int, object] = {}  # rank → equal for ranks that are alike
        self._streaks: dict[tuple[int, Tensor], tuple[int, int]] = {}  # first step, length
        self._far: set[int] = set()  # ranks that were reported
        self._late: dict[int, str] = {}
        self._reached: dict[int, dict[int, int]] = {}  # step → rank → time
        self._last: dict[int, tuple[int, int]] = {}  # rank → step and time

    # -- statistics ----------------------------------------------------------------------

    def compare(self, found: StepStatistics) -> Iterator[Alert]:
        """Yield an alert for each rank that is far from those that it should be like."""
        outlier = np.zeros(found.value.shape, np.bool_)
        median = np.full(found.value.shape, np.nan)
        for rows in self._alike(found.ranks):
            median[rows], outlier[rows] = self._outliers(found.value[rows], found.nonfinite[rows])
        streaks: dict[tuple[int, Tensor], tuple[int, int]] = {}
        far: dict[int, list[int]] = {}  # columns, by row
        if self._streaks:
            streaks.update(self._paused(found))
        for row, column in zip(*(each.tolist() for each in np.nonzero(outlier)), strict=True):
            key = found.ranks[row], found.tensors[column]
            first, length = self._streaks.get(key, (found.step, 0))
            streaks[key] = first, length + 1
            if length + 1 >= self.limits.patience:
                far.setdefault(row, []).append(column)
        self._streaks = streaks
        for row, columns in far.items():
            if found.ranks[row] not in self._far:
                since = streaks[found.ranks[row], found.tensors[columns[0]]][0]
                yield _far_alert(found, row, columns, since, median[row, columns[0]])
        self._far = {found.ranks[row] for row in far} | (self._far - set(found.ranks))

    def preview(self, steps: Iterable[StepStatistics]) -> list[Alert]:
        """Return the alerts for steps of which records may be missing; they are compared again."""
        before = self._streaks, self._far
        alerts = [alert for found in steps for alert in self.compare(found)]
        self._streaks, self._far = before
        return alerts

    def _paused(self, found: StepStatistics) -> Iterator[tuple[Any, tuple[int, int]]]:
        """Yield the streaks of tensors that were not recorded in this step."""
        rows = {rank: row for row, rank in enumerate(found.ranks)}
        columns = {tensor: column for column, tensor in enumerate(found.tensors)}
        recorded = ~np.isnan(found.value) | found.nonfinite
        for key, streak in self._streaks.items():
            row, column = rows.get(key[0]), columns.get(key[1])
            if row is None or column is None or not recorded[row, column]:
                yield key, streak

    def _alike(self, ranks: list[int]) -> Iterator[NDArray[np.int64]]:
        """Yield the rows of ranks that should be alike."""
        rows: dict[object, list[int]] = {}
        for row, rank in enumerate(ranks):
            rows.setdefault(self.groups.get(rank), []).append(row)
        for group in rows.values():
            yield np.array(group)

    def _outliers(
        self, value: Floats, nonfinite: NDArray[np.bool_]
    ) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the median of each column, and which cells are far from it."""
        median, deviation = deviations(value)
        size, usual = np.abs(value), np.abs(median)
        factor = self.limits.factor
        apart = (size > factor * usual) | (size < usual / factor) | (value * median < 0)
        few = (nonfinite.mean(axis=0) < 0.5) & (len(value) > 3)
        far = (deviation > self.limits.deviations) & apart
        return median, np.asarray(far | (nonfinite & few))

    # -- progress ------------------------------------------------------------------------

    def reach(self, rank: int, step: int, time_ns: int) -> None:
        """Note that a rank has recorded something of a step."""
        last = self._last.get(rank)
        if last is None or step > last[0]:
            self._reached.setdefault(step, {})[rank] = time_ns
            if len(self._reached) > KEPT_STEPS:
                del self._reached[min(self._reached)]
        if last is None or (step, time_ns) > last:
            self._last[rank] = step, time_ns

    def late(self, now_ns: int | None = None) -> Iterator[Alert]:
        """Yield an alert for each rank that has fallen behind or become silent since the last call.

        `now_ns` is the time in a live session; of a run, the times of its records count.
        """
        found = {alert.rank: alert for alert in self.all_late(now_ns)}
        new = [a for rank, a in found.items() if self._late.get(rank) != a.rule]
        self._late = {rank: alert.rule for rank, alert in found.items()}
        yield from new

    def all_late(self, now_ns: int | None = None) -> Iterator[Alert]:
        """Yield an alert for each rank that is behind most ranks, or silent."""
        # all ranks have passed the steps before
        slowest = min(self.last_steps.values(), default=0)
        for step in [step for step in self._reached if step <= slowest]:
            del self._reached[step]
        # when more than half of the ranks had come to a step
        half = len(self._last) // 2
        reached = {
            step: int(np.partition(list(times.values()), half)[half])
            for step, times in self._reached.items()
            if len(times) > half
        }
        if not reached:
            return
        newest = max(reached)
        for rank, (step, time_ns) in sorted(self._last.items()):
            behind = sum(each > step for each in reached)
            # records may arrive late: what counts is how far most ranks were at that time
            was_behind = sum(s > step and t <= time_ns for s, t in reached.items())
            waited = ((reached[newest] if now_ns is None else now_ns) - time_ns) / 1e9
            if behind and waited > self.limits.seconds:
                message = (
                    f"rank {rank} is silent: its last record is of step {step:,}, most ranks are "
                    f"at step {newest:,}, {waited:.0f} s later"
                )
                rule = "silent"
            elif min(behind, was_behind) >= self.limits.behind:
                message = (
                    f"rank {rank} is {behind:,} recorded steps behind: it is at step {step:,}, "
                    f"most ranks are at step {newest:,}"
                )
                rule = "straggler"
            else:
                continue
            facts = {"behind": float(behind)}
            title = f"rank {rank}"
            yield Alert(rule, title, Kind.METRIC, newest, rank, "", message, facts=facts)

    @property
    def last_steps(self) -> dict[int, int]:
        """The last step of each rank."""
        return {rank: step for rank, (step, _) in self._last.items()}


def _far_alert(
    found: StepStatistics, row: int, columns: list[int], since: int, median: float
) -> Alert:
    rank, (kind, name) = found.ranks[row], found.tensors[columns[0]]
    value = found.value[row, columns[0]]
    what = "value" if kind is Kind.METRIC else "RMS"
    held = "NaN or Inf" if found.nonfinite[row, columns[0]] else f"its {what} is {value:.4g}"
    more = f"; so are {len(columns) - 1:,} more of its tensors" if len(columns) > 1 else ""
    message = (
        f"rank {rank} is far from the other ranks since step {since:,}: {held}, "
        f"their median is {median:.4g}{more}"
    )
    module = module_of(Record(name, kind, 0, 0, 0, 0, 1, 0))
    facts = {"value": float(value), "median": float(median), "tensors": float(len(columns))}
    return Alert("outlier", name, kind, found.step, rank, module, message, module, facts=facts)


def alike_key(mesh: str, is_tensor_parallel: bool) -> tuple[tuple[str, int], ...]:
    """Return what ranks have in common that should be alike: their places along other dimensions.

    >>> alike_key("dp=0/2 tp=1/4", True)
    (('tp', 1),)
    """
    found = parse_mesh(mesh)
    return tuple(
        (dim, at)
        for dim, at in zip(found.dims, found.place, strict=True)
        if not is_alike(dim, is_tensor_parallel)
    )


def is_alike(dim: str, is_tensor_parallel: bool) -> bool:
    """Return whether ranks along a dimension of a mesh do the same with other batches."""
    if _UNNAMED.fullmatch(dim):  # in a mesh without names: that of FSDP, or of tensor parallelism
        return not is_tensor_parallel
    return any(_ALIKE.fullmatch(part) for part in re.split(r"[^a-z]+", dim.lower()))


def alike_groups(mesh: MeshLayout) -> list[list[int]]:
    """Return groups of ranks that do the same with other batches.

    >>> alike_groups(MeshLayout(("dp", "tp"), {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}))
    [[0, 2], [1, 3]]
    """
    fixed = [i for i, dim in enumerate(mesh.dims) if dim != "rank" and not is_alike(dim, True)]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in mesh.coordinates.items():
        groups.setdefault(tuple(place[i] for i in fixed), []).append(rank)
    return list(groups.values())
