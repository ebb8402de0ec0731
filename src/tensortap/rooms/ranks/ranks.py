"""A statistic of all ranks side by side, and which ranks are far from the others."""

from __future__ import annotations

import re
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.core.record import Kind
from tensortap.rooms.ranks.mesh import mesh_layout
from tensortap.runs.arrow import numbers
from tensortap.table.numbering import codes
from tensortap.table.shard_keys import LAYOUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tensortap.table.sources import Integers
    from tensortap.table.table import Table

    Booleans = NDArray[np.bool_]
    Floats = NDArray[np.float64]
    Groups = Sequence[Sequence[int]]  # of ranks

FAR, FACTOR = 8.0, 2.0
"""A rank is far if it is so many deviations from the median, and so many times as large or small.
"""

_FEWEST = 4  # ranks of which one can be told from the others
_TYPICAL = 0.75  # part of the usual deviation that a column has at least
_LARGEST = 1e6  # deviations, where most ranks are equal
# dimensions of a mesh along which ranks do the same with other batches
_ALIKE = re.compile(r".*dp|data|batch|replicate|shard|cp|context")
_UNNAMED = re.compile(r"dim\d+")

_last_matrix: weakref.WeakKeyDictionary[Table, tuple[Any, RankMatrix]] = weakref.WeakKeyDictionary()


class RankMatrix(NamedTuple):
    """A statistic: one row per rank, one column per step or name; NaN where there is no record."""

    ranks: Integers
    columns: Integers  # steps, or codes of names
    value: Floats
    nonfinite: Booleans  # tensors with NaN or Inf
    median: Floats  # of the ranks that each cell is compared with
    deviation: Floats  # distance to the median, in deviations as `deviations` returns them
    far: Booleans  # cells that are far from the other ranks, see `compared`

    def select(self, columns: Integers) -> RankMatrix:
        """Return some columns."""
        return RankMatrix(
            self.ranks, self.columns[columns], self.value[:, columns], self.nonfinite[:, columns],
            self.median[:, columns], self.deviation[:, columns], self.far[:, columns],
        )  # fmt: skip


def over_steps(table: Table, kind: str, name: str, metric: str) -> RankMatrix:
    """Return a statistic of one name: ranks by steps.

    The last matrix is kept: a page draws it again when groups are opened.
    """
    key = table.generation, table.version, kind, name, metric
    known = _last_matrix.get(table)
    if known is None or known[0] != key:
        few = table.near([(kind, name)])
        rows = few.series(kind, name, ordered=False)
        matrix = _matrix(few, rows, few.step[rows], metric, alike_groups(table))
        known = _last_matrix[table] = key, matrix
    return known[1]


def over_names(
    table: Table, kind: str, step: int, metric: str, names: Sequence[str] | None = None
) -> RankMatrix:
    """Return a statistic of all names of a kind at one step: ranks by names of `table.index()`."""
    few = table.at_step(step)
    code = few.kinds.index(kind) if kind in few.kinds else -1
    rows = np.flatnonzero((few.step == step) & (few.kind == code))
    number = {name: i for i, name in enumerate(table.index().names)}
    wanted = number if names is None else set(names)
    column = np.array([number[n] if n in wanted else -1 for n in few.names], np.int64)
    rows = rows[column[few.name[rows]] >= 0]
    return _matrix(few, rows, column[few.name[rows]], metric, alike_groups(table))


def _matrix(
    table: Table, rows: Integers, column: Integers, metric: str, groups: Groups
) -> RankMatrix:
    known = table.is_known(metric, rows)
    rows, column = rows[known], column[known]
    value, bad = table.column(metric)[rows], table.nonfinite(rows) > 0
    return compared(table.rank[rows], column, value, bad, groups)


def compared(
    rank: Integers, column: Integers, value: Floats, bad: Booleans, groups: Groups
) -> RankMatrix:
    """Return the matrix of some values; of several in a cell, the last counts.

    A cell is far if it is `FAR` deviations from the median of its group of ranks and `FACTOR` times
    as large or as small, or if it is not finite while most ranks are. `bad` values are not finite.
    """
    ranks, columns = np.unique(rank.astype(np.int64)), np.unique(column)
    cell = codes(rank) * len(columns) + codes(column)
    values = np.full((len(ranks), len(columns)), np.nan)
    values.ravel()[cell] = value
    nonfinite = np.isinf(values)
    values[nonfinite] = np.nan
    nonfinite.ravel()[cell[bad]] = True
    median, deviation = np.full_like(values, np.nan), np.zeros_like(values)
    far = np.zeros(values.shape, np.bool_)
    for members in groups:
        among = np.flatnonzero(np.isin(ranks, members))
        own, own_bad = values[among], nonfinite[among]
        middle, deviation[among] = deviations(own)
        median[among] = middle
        size, usual = np.abs(own), np.abs(middle)
        apart = (size > FACTOR * usual) | (size < usual / FACTOR) | (own * middle < 0)
        few = (own_bad.sum(axis=0) < 0.5 * len(among)) & (len(among) >= _FEWEST)
        far[among] = ((deviation[among] > FAR) & apart) | (own_bad & few)
    return RankMatrix(ranks, columns, values, nonfinite, median, deviation, far)


def deviations(value: Floats) -> tuple[Floats, Floats]:
    """Return the median of each column, and how far its cells are from it.

    The unit is the median of the distances (MAD), scaled so that it is the standard deviation of
    normally distributed values. Few ranks may be close to each other by chance, so the unit is at
    least three quarters of what is typical of all columns. Of fewer than four values, none is far.

    >>> median, far = deviations(np.array([[1.0], [1.1], [0.9], [1.05], [5.0]]))
    >>> median, far.round(1).T
    (array([1.05]), array([[ 0.7,  0.7,  2. ,  0. , 53.3]]))
    """
    median, count = _medians(value)
    distance = np.abs(value - median)
    spread, size = 1.4826 * _medians(distance)[0], np.abs(median)
    usual = spread[size > 0] / size[size > 0]
    typical = float(np.median(usual[~np.isnan(usual)])) if (usual >= 0).any() else 0.0
    spread = np.maximum(spread, max(_TYPICAL * typical, 1e-9) * size) + 1e-300  # most may be equal
    deviation = np.minimum(distance / spread, _LARGEST)
    deviation[:, count < _FEWEST] = 0.0
    return median, np.nan_to_num(deviation)


def _medians(value: Floats) -> tuple[Floats, Integers]:
    """Return medians of columns without their NaN, and how many values each has."""
    count = (~np.isnan(value)).sum(axis=0)
    if not value.size:
        return np.full(value.shape[1], np.nan), count
    at = np.arange(len(count))
    below, above = np.maximum(count - 1, 0) // 2, np.minimum(count // 2, value.shape[0] - 1)
    middle = np.unique(np.concatenate([below, above]))
    # NaN last; mostly all columns have the same middle, which needs no complete order
    ordered = np.partition(value.T, middle) if len(middle) < 3 else np.sort(value.T, axis=1)
    low, high = ordered[at, below], ordered[at, above]
    return 0.5 * (low + high), count


def alike_groups(table: Table) -> list[list[int]]:
    """Return groups of ranks that do the same with other batches: only these are compared.

    In a mesh of ``dp`` and ``tp``, these are the ranks with the same place along ``tp``.
    """
    mesh = mesh_layout(table)
    fixed = [i for i, dim in enumerate(mesh.dims) if dim != "rank" and not _is_alike(table, dim)]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in mesh.coordinates.items():
        groups.setdefault(tuple(place[i] for i in fixed), []).append(rank)
    return list(groups.values())


def uncompared(table: Table) -> str:
    """Return of how many ranks no statistics are compared, as a sentence; empty if of none."""
    count = sum(len(group) for group in alike_groups(table) if len(group) < _FEWEST)
    return (
        f"statistics of {count:,} ranks are not compared: fewer than 4 do the same" if count else ""
    )


def _is_alike(table: Table, dim: str) -> bool:
    """Return whether ranks along a dimension of a mesh do the same with other batches."""
    if not _UNNAMED.fullmatch(dim):
        return any(_ALIKE.fullmatch(part) for part in re.split(r"[^a-z]+", dim.lower()))
    # a mesh without names is that of FSDP or of tensor parallelism, whose outputs have a layout
    whole = table.index()
    rows = whole.rows(kind=Kind.ACTIVATION.value)
    return not whole.shard_keys().has(LAYOUT, rows).any()


class RankProgress(NamedTuple):
    """The progress of each rank."""

    ranks: Integers
    records: Integers
    first: Integers  # step
    last: Integers  # step
    behind: Integers  # recorded steps after its last one


def progress(table: Table) -> RankProgress:
    """Return how many records each rank has, its first and last step, and who is behind."""
    windows, loose = table.compacted() or ((), table)
    parts = [(r, n, a, b) for w in windows for r, (n, a, b, _) in w.manifest.ranks.items()]
    rank, code = np.unique(loose.rank, return_inverse=True)
    for number, each in enumerate(rank.tolist()):
        step = loose.step[code == number]
        parts.append((each, len(step), int(step.min()), int(step.max())))
    given, records, first, last = np.array(parts, np.int64).reshape(-1, 4).T
    ranks, row = np.unique(given, return_inverse=True)
    total, begin = np.zeros(len(ranks), np.int64), np.full(len(ranks), np.iinfo(np.int64).max)
    end = np.full(len(ranks), np.iinfo(np.int64).min)
    np.add.at(total, row, records)
    np.minimum.at(begin, row, first)
    np.maximum.at(end, row, last)
    steps = table.steps()
    behind = len(steps) - np.searchsorted(steps, end, side="right")
    return RankProgress(ranks, total, begin, end, behind)


def last_times(table: Table, made: RankProgress, ranks: Integers) -> dict[int, int]:
    """Return the time of the newest record of some ranks."""
    windows, loose = table.compacted() or ((), table)
    last = dict(zip(made.ranks.tolist(), made.last.tolist(), strict=True))
    found: dict[int, int] = {}
    for window in windows:
        for rank, (_, _, step, time_ns) in window.manifest.ranks.items():
            if step == last[rank]:
                found[rank] = max(time_ns, found.get(rank, time_ns))
    rows = np.flatnonzero(np.isin(loose.rank, ranks))
    rows = rows[loose.step[rows] == made.last[np.searchsorted(made.ranks, loose.rank[rows])]]
    times = numbers(loose.take(rows, ["time_ns"]).column("time_ns")).tolist()
    for rank, time_ns in zip(loose.rank[rows].tolist(), times, strict=True):
        found[rank] = max(time_ns, found.get(rank, time_ns))
    return found
