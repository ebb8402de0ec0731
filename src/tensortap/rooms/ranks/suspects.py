"""Tensors that may differ between ranks, by few numbers of each: all others need not be read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from tensortap.core.record import Kind
from tensortap.rooms.ranks.ranks import FACTOR
from tensortap.runs.arrow import coded, numbers
from tensortap.runs.windows import Window
from tensortap.table.columns import NONFINITE_COUNTS, VALUE, is_valid
from tensortap.table.numbering import codes
from tensortap.table.shard_keys import SHARD, contents_of, same_tensor, unequal_groups
from tensortap.table.table import Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tensortap.table.sources import Integers

    Booleans = NDArray[np.bool_]
    Floats = NDArray[np.float64]

Series = tuple[str, str]
"""Kind and name of a tensor."""

COMPARED = (
    Kind.ACTIVATION, Kind.GRADIENT, Kind.WEIGHT, Kind.WEIGHT_GRADIENT, Kind.OPTIMISER_STATE,
    Kind.METRIC,
)  # fmt: skip
"""The kinds of records that are compared."""

PARAMETERS = (Kind.WEIGHT, Kind.WEIGHT_GRADIENT, Kind.OPTIMISER_STATE)
# a program may average gradients after they were recorded, so those of ranks may differ
REPLICATED = (Kind.WEIGHT, Kind.OPTIMISER_STATE)
_CHUNK = 1 << 17  # rows that are looked at at a time, if they have several steps; bounds memory


def suspects(table: Table) -> set[Series]:
    """Return kind and name of tensors of which a rank may be far, or whose replicas differ.

    All others cannot be among the findings. Of a compacted run, the roll-up tells it.
    """
    windows, loose = table.compacted() or ((), table)
    found: set[Series] = set()
    for chunk in _chunks(loose, np.flatnonzero(is_kind(loose, COMPARED))):
        found |= names_of(loose, chunk[_is_suspect(loose, chunk)])
    for window in windows:
        found |= _rolled_suspects(window)
        found |= names_of(loose, np.flatnonzero(window.has(loose.step)))  # rows that came late
    compared = {kind.value for kind in COMPARED}
    # a name counts as replicated if its gradients are
    parameters = {name for kind, name in found if kind in PARAMETERS}
    return {each for each in found if each[0] in compared} | {
        (kind, name) for kind in PARAMETERS for name in parameters
    }


def names_of(table: Table, rows: Integers) -> set[Series]:
    """Return kind and name of some rows."""
    pairs = np.unique(table.kind[rows].astype(np.int64) * len(table.names) + table.name[rows])
    found = (divmod(pair, len(table.names)) for pair in pairs.tolist())
    return {(table.kinds[kind], table.names[name]) for kind, name in found}


def _is_suspect(table: Table, rows: Integers) -> Booleans:
    """Return which rows are of tensors that may differ between ranks."""
    series = table.kind[rows].astype(np.int64) * len(table.names) + table.name[rows]
    value, bad = values_of(table, rows)
    found = _is_spread(codes(table.step[rows], series), value, value, bad)
    own = np.flatnonzero(is_kind(table, PARAMETERS, rows) & (table.column("count")[rows] > 0))
    groups, content = replicas_of(table, rows[own])
    found[own] |= unequal_groups(table, rows[own], groups, content)[groups]
    return found


def _is_spread(cell: Integers, low: Floats, high: Floats, bad: Booleans) -> Booleans:
    """Return which values are of cells in which one may be `FACTOR` times as large as another."""
    count = int(cell.max(initial=-1)) + 1
    least, most = np.full(count, np.inf), np.full(count, -np.inf)
    known = ~np.isnan(low)
    np.minimum.at(least, cell[known], low[known])
    np.maximum.at(most, cell[known], high[known])
    spread = least < most
    spread &= ~((least > 0) & (most <= FACTOR * least))
    spread &= ~((most < 0) & (least >= FACTOR * most))
    spread[cell[bad]] = True
    return np.asarray(spread[cell])


def _rolled_suspects(window: Window) -> set[Series]:
    """Return the tensors of a window that may differ between ranks, by its roll-up."""
    import pyarrow as pa

    wanted = ["kind", "name", "step", "number", "rm2", *NONFINITE_COUNTS, "differs", "far"]
    groups = [window.whole.read(group, wanted) for group in window.whole.groups()]
    if not groups:
        return set()
    cells = pa.concat_tables(groups, promote_options="permissive")
    (kind, kinds), (name, names) = (coded(cells.column(each)) for each in ("kind", "name"))
    column = {each: numbers(cells.column(each)) for each in wanted[2:-2]}
    is_metric = np.array([each == Kind.METRIC for each in kinds], np.bool_)[kind]
    bad = sum(np.nan_to_num(column[each]) for each in NONFINITE_COUNTS) > 0
    bad |= is_metric & is_valid(cells.column("number")) & ~np.isfinite(column["number"])
    # all ranks are between these, since the farthest is: by so much, relative to their median
    far = np.where(is_valid(cells.column("far")), numbers(cells.column("far")), 0.0)
    ratio = np.where(far < 1, (1 + far) / np.maximum(1 - far, 1e-9), np.inf)
    value = np.where(is_metric, column["number"], column["rm2"])
    ratio[is_metric | (value == 0)] = 1.0
    series = kind.astype(np.int64) * len(names) + name
    found = _is_spread(codes(series, column["step"]), value / ratio, value * ratio, bad)
    found |= numbers(cells.column("differs").cast("int8")) > 0
    pairs = (divmod(pair, len(names)) for pair in np.unique(series[found]).tolist())
    return {(kinds[kind], names[name]) for kind, name in pairs}


def is_kind(table: Table, kinds: Iterable[Kind], rows: Integers | None = None) -> Booleans:
    """Return which of some rows, or of all, are of some kinds."""
    wanted = {kind.value for kind in kinds}
    is_wanted = np.array([kind in wanted for kind in table.kinds], np.bool_)
    return np.asarray(is_wanted[table.kind if rows is None else table.kind[rows]])


def _chunks(table: Table, rows: Integers) -> Iterator[Integers]:
    """Yield the rows of several steps at a time, by step."""
    step = codes(table.step[rows])
    order = np.argsort(step, kind="stable")
    first = np.flatnonzero(np.diff(step[order], prepend=-1))  # of each step
    edges = first[np.flatnonzero(np.diff(first // _CHUNK, prepend=-1))]
    if len(rows):
        yield from np.split(rows[order], edges[1:])


def values_of(table: Table, rows: Integers) -> tuple[Floats, Booleans]:
    """Return what is compared of some rows, the RMS or a metric, and which are not finite."""
    is_metric = is_kind(table, [Kind.METRIC], rows)
    value, bad = table.column("rm2")[rows], table.nonfinite(rows) > 0
    if is_metric.any():
        value[is_metric] = table.column(VALUE)[rows[is_metric]]
        bad |= is_metric & table.has_number(rows) & ~np.isfinite(value)
    return value, bad


def replicas_of(table: Table, rows: Integers) -> tuple[Integers, NDArray[np.uint64]]:
    """Return a number of each replica's tensor, and 64 bits that differ if the replicas do."""
    keys = table.shard_keys()
    place = np.where(keys.has(SHARD, rows), keys.place[rows], -1)
    groups = codes(same_tensor(table, rows), place)
    return groups, contents_of(table, rows, groups)
