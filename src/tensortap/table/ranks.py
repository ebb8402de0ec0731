"""A statistic of all ranks side by side, and which ranks are far from the others."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.alerts.rank_rules import FAR
from tensortap.record import Kind
from tensortap.table.numbering import codes, distinct, stable_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tensortap.table.sources import Integers
    from tensortap.table.table import Table

    Floats = NDArray[np.float64]
    Groups = Sequence[Sequence[int]]  # of ranks

_FEWEST = 4  # ranks of which one can be told from the others
_TYPICAL = 0.75  # part of the usual deviation that a column has at least
_LARGEST = 1e6  # deviations, where most ranks are equal


_last_matrix: weakref.WeakKeyDictionary[Table, tuple[Any, RankMatrix]] = weakref.WeakKeyDictionary()


class RankMatrix(NamedTuple):
    """A statistic: one row per rank, one column per step or name; NaN where there is no record."""

    ranks: Integers
    columns: Integers  # steps, or codes of names
    value: Floats
    nonfinite: NDArray[np.bool_]  # tensors with NaN or Inf
    median: Floats  # of each column
    deviation: Floats  # distance to the median, in deviations as `deviations` returns them

    @property
    def outliers(self) -> NDArray[np.bool_]:
        """Cells that are far from the other ranks, or hold NaN or Inf while most ranks do not."""
        few = self.nonfinite.mean(axis=0) < 0.5
        return np.asarray((self.deviation > FAR) | (self.nonfinite & few))

    def select(self, columns: Integers) -> RankMatrix:
        """Return some columns."""
        return RankMatrix(
            self.ranks, self.columns[columns], self.value[:, columns], self.nonfinite[:, columns],
            self.median[columns], self.deviation[:, columns],
        )  # fmt: skip


def over_steps(table: Table, kind: str, name: str, metric: str, groups: Groups = ()) -> RankMatrix:
    """Return a statistic of one name: ranks by steps; each is compared with those of its group.

    The last matrix is kept: a page draws it again when groups are opened.
    """
    key = table.generation, table.version, kind, name, metric, groups
    known = _last_matrix.get(table)
    if known is None or known[0] != key:
        rows = table.series(kind, name, ordered=False)
        known = _last_matrix[table] = key, _matrix(table, rows, table.step[rows], metric, groups)
    return known[1]


def over_names(
    table: Table,
    kind: str,
    step: int,
    metric: str,
    names: Sequence[str] | None = None,
    groups: Groups = (),
) -> RankMatrix:
    """Return a statistic of all names of a kind at one step: ranks by names."""
    code = table.kinds.index(kind) if kind in table.kinds else -1
    rows = np.flatnonzero((table.step == step) & (table.kind == code))
    if names is not None:
        wanted = set(names)
        known = [i for i, name in enumerate(table.names) if name in wanted]
        rows = rows[np.isin(table.name[rows], known)]
    return _matrix(table, rows, table.name[rows].astype(np.int64), metric, groups)


def _matrix(
    table: Table, rows: Integers, column: Integers, metric: str, groups: Groups = ()
) -> RankMatrix:
    known = table.is_known(metric, rows)
    rows, column = rows[known], column[known]
    rank = table.rank[rows].astype(np.int64)
    ranks, columns = distinct(rank), distinct(column)
    cell = codes(rank) * len(columns) + codes(column)
    value = np.full((len(ranks), len(columns)), np.nan)
    value.ravel()[cell] = table.column(metric)[rows]  # of several calls, the last
    nonfinite = np.isinf(value)
    value[nonfinite] = np.nan
    nonfinite.ravel()[cell[table.nonfinite(rows) > 0]] = True
    if not groups:
        return RankMatrix(ranks, columns, value, nonfinite, *deviations(value))
    deviation = np.zeros_like(value)
    for members in groups:
        among = np.flatnonzero(np.isin(ranks, members))
        deviation[among] = deviations(value[among])[1]
    return RankMatrix(ranks, columns, value, nonfinite, _medians(value)[0], deviation)


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


class RankProgress(NamedTuple):
    """The progress of each rank."""

    ranks: Integers
    records: Integers
    first: Integers  # step
    last: Integers  # step
    behind: Integers  # recorded steps after its last one


def progress(table: Table) -> RankProgress:
    """Return how many records each rank has, its first and last step, and who is behind."""
    ranks, row = distinct(table.rank.astype(np.int64)), codes(table.rank)
    first = np.full(len(ranks), np.iinfo(np.int64).max)
    last = np.full(len(ranks), np.iinfo(np.int64).min)
    np.minimum.at(first, row, table.step)
    np.maximum.at(last, row, table.step)
    steps = table.steps()
    behind = len(steps) - np.searchsorted(steps, last, side="right")
    return RankProgress(ranks, np.bincount(row, minlength=len(ranks)), first, last, behind)


class FarRank(NamedTuple):
    """A tensor of a rank that is far from those of the other ranks."""

    rank: int
    name: str
    kind: str
    first_step: int
    last_step: int
    steps: int  # in how many steps
    deviations: float  # at most


def far_ranks(table: Table, metric: str, most_steps: int) -> list[FarRank]:
    """Return tensors of ranks that are far from the others, the farthest first.

    Only the last recorded steps are examined.
    """
    recent = table.steps()[-most_steps:]
    left_out = (Kind.VALUE.value, Kind.LOCAL.value)
    wanted = [kind in table.tensor_kinds() and kind not in left_out for kind in table.kinds]
    rows = np.flatnonzero(np.array(wanted, np.bool_)[table.kind] & (table.step >= recent[:1].sum()))
    found: dict[tuple[int, int, str], FarRank] = {}
    for members in _groups(table, rows):  # one kind and step at a time, by steps
        kind, step = table.kinds[table.kind[members[0]]], int(table.step[members[0]])
        matrix = _matrix(table, members, table.name[members].astype(np.int64), metric)
        for row, column in zip(*np.nonzero(matrix.outliers), strict=True):
            rank, name = int(matrix.ranks[row]), int(matrix.columns[column])
            far = float(matrix.deviation[row, column])
            first = FarRank(rank, table.names[name], kind, step, step, 0, 0.0)
            known = found.get((rank, name, kind), first)
            found[rank, name, kind] = known._replace(
                last_step=step, steps=known.steps + 1, deviations=max(known.deviations, far)
            )
    return sorted(found.values(), key=lambda far: (-far.steps, -far.deviations))


def _groups(table: Table, rows: Integers) -> list[Integers]:
    """Return the rows of each step and kind."""
    group = codes(table.step[rows], table.kind[rows])
    order = stable_order(group)
    edges = np.flatnonzero(np.diff(group[order])) + 1
    return np.split(rows[order], edges) if len(rows) else []
