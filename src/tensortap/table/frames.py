"""Views of a table as pandas frames, built column by column.

`stats_of` (one flat row per record) and `metrics_of` (training statistics).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tensortap.core.record import Kind, Record, TensorData
from tensortap.runs.rows import DICT_PREFIX, HEAD_COLUMNS, STATISTICS, number_of, records_of
from tensortap.stats import summarize_array
from tensortap.table.columns import has_tag
from tensortap.table.kinds import KINDS, need_pandas
from tensortap.table.selection import choose_rank
from tensortap.table.table import Table, table_of
from tensortap.values.view import as_numpy

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from numpy.typing import NDArray

    from tensortap.runs.run_reader import RunReader

    Integers = NDArray[np.int64]

COUNTS = STATISTICS[:5]  # the statistics that are integers
_PARAMETERS = (Kind.WEIGHT, Kind.WEIGHT_GRADIENT, Kind.OPTIMISER_STATE)


def stats_of(origin: Any, *, rank: int | str | None = "all") -> pd.DataFrame:
    """Return one row per record: name, kind, step, call, rank, dtype, value, all statistics.

    Of several ranks, also ``placements``: a partial sum, ``P(sum)``, is no value yet.
    """
    need_pandas("run.stats()")
    import pyarrow as pa
    import pyarrow.compute as pc

    parts = table_of(origin)
    table, of_rank = choose_rank(parts, rank)
    order = np.lexsort((np.arange(len(table)), table.rank, table.seq, table.step))
    # the last row of a record counts: it may have computed statistics
    ranks, seq = table.rank[order], table.seq[order]
    last = np.append((np.diff(ranks) != 0) | (np.diff(seq) != 0), True)[: len(order)]
    rows = order[last & (True if of_rank is None else ranks == of_rank)]
    columns: dict[str, Any] = {
        "name": _texts(table.names, table.name[rows]),
        "kind": _texts(table.kinds, table.kind[rows]),
        "step": table.step[rows],
        "call": table.call[rows],
        "rank": table.rank[rows].astype(np.int32),
        "dtype": _texts(table.dtypes, table.dtype[rows]),
        "value": table.column("value")[rows],
    }
    if len(parts.ranks()) > 1:
        tags = table.take(rows, ["tags"]).column("tags")
        columns["placements"] = pc.fill_null(pc.map_lookup(tags, "placements", "first"), "")
    for name in STATISTICS:
        column = table.column(name)[rows]
        complete = name in COUNTS and not np.isnan(column).any()
        columns[name] = column.astype(np.int64) if complete else column
    return pa.table(columns).to_pandas()


def metrics_of(origin: Any, names: Sequence[str] = ()) -> pd.DataFrame:
    """Return training statistics: one row per step and rank, one column per metric.

    With `names`, any records that are single numbers count as metrics. Of two values for one
    step and rank, the later one counts.

    >>> from tensortap.core.record import Record
    >>> metrics_of([Record("loss", Kind.METRIC, 3, 0, 0, 0, 1, 0, value=0.5)])
       step  rank  loss
    0     3     0   0.5
    """
    pd = need_pandas("a frame of metrics")
    table = table_of(origin)
    if names:
        chosen = np.isin(table.name, [i for i, name in enumerate(table.names) if name in names])
    else:
        chosen = np.isin(table.kind, _codes(table.kinds, [Kind.METRIC]))
    rows = np.flatnonzero(chosen)
    rows = rows[table.has_number(rows)]
    columns = {
        "step": table.step[rows], "rank": table.rank[rows].astype(np.int32),
        "seq": table.seq[rows], "name": _texts(table.names, table.name[rows]),
        "number": table.column("value")[rows],
    }  # fmt: skip
    long = pd.DataFrame(columns).sort_values(["step", "rank", "seq"], kind="stable")
    long = long.drop_duplicates(["step", "rank", "name"], keep="last")
    wide = long.pivot(index=["step", "rank"], columns="name", values="number")
    in_order = names or long.sort_values("seq")["name"].unique()
    wide = wide[[name for name in in_order if name in wide.columns]]
    wide.columns.name = None
    return wide.reset_index()


# -- rows and their labels -----------------------------------------------------------------


def rows_with_statistics(
    table: Table, columns: list[str], among: Integers | slice = slice(None)
) -> tuple[Integers, pa.Table]:
    """Return the rows of tensors with statistics by (step, seq, rank), and columns of them.

    Rows that activation checkpointing computed a second time are left out. `columns` must
    contain ``tags``.
    """
    rows = np.arange(len(table))[among]
    tensors = np.isin(table.kind[rows], _codes(table.kinds, KINDS))
    rows = rows[tensors & ~np.isnan(table.column("count")[rows])]
    rows = rows[np.lexsort((table.rank[rows], table.seq[rows], table.step[rows]))]
    cells = table.take(rows, columns)
    first = ~has_tag(cells, "recompute")
    return (rows, cells) if first.all() else (rows[first], cells.filter(first))


def layer_names(table: Table, rows: Integers, cells: pa.Table) -> Any:
    """Return names as people look for them: ``blocks.0.wq``, not ``blocks.0.wq.weight``."""
    import pyarrow.compute as pc

    # the state of an optimizer has the name of its parameter; its key is part of the type
    name = pc.coalesce(_tag(cells, "parameter"), _texts(table.names, table.name[rows]))
    is_parameter = np.isin(table.kind[rows], _codes(table.kinds, _PARAMETERS))
    if not is_parameter.any():
        return name
    return pc.if_else(is_parameter, pc.replace_substring_regex(name, r"(.)\.weight$", r"\1"), name)


def tensor_types(table: Table, rows: Integers, cells: pa.Table) -> Any:
    """Return the kind of every row; for optimizer state with its key."""
    import pyarrow as pa
    import pyarrow.compute as pc

    is_state = np.isin(table.kind[rows], _codes(table.kinds, [Kind.OPTIMISER_STATE]))
    kind = _texts(table.kinds, table.kind[rows])
    if not is_state.any():
        return kind
    state = pc.if_else(is_state, _tag(cells, "state"), pa.scalar(None, pa.string()))
    return pc.binary_join_element_wise(kind, state, ".", null_handling="skip")


def add_stash(figures: dict[str, Any], cells: pa.Table) -> dict[int, dict[float, int]]:
    """Add the numbers that a `stash=` function gave to columns; return its exponents by row.

    A dict ``scalar_stats`` in it replaces statistics; other numbers of their names become
    ``stash.std``. A dict ``exp_hist`` has counts (``hist``) of exponents (``bins``), of which the
    first and the last count what lies below and above, as in track-and-visualize.
    """
    import pyarrow.compute as pc

    values = cells.column("value")
    is_mapping = pc.fill_null(pc.starts_with(values, pattern=DICT_PREFIX), False)
    rows = np.flatnonzero(is_mapping.to_numpy())
    if not len(rows):
        return {}
    encoded = values.filter(is_mapping).to_pylist()
    # decoded as one array: a decoder call per row would take most of the time
    header = b"\xdd" + len(encoded).to_bytes(4, "big")
    mappings = msgspec.msgpack.decode(header + b"".join(encoded))
    columns: dict[str, NDArray[np.float64]] = {}
    exponents: dict[int, dict[float, int]] = {}
    for row, (_, items) in zip(rows.tolist(), mappings, strict=True):
        lists = {}
        for name, value in items:
            if type(name) is not str:
                continue
            if type(value) in (float, int, bool):
                label = name.removeprefix("scalar_stats.")
                label = f"stash.{name}" if label == name and name in STATISTICS else label
                if label not in columns:
                    columns[label] = np.full(cells.num_rows, np.nan)
                    columns[label][:] = figures.get(label, np.nan)
                columns[label][row] = value
            elif name in ("exp_hist.hist", "exp_hist.bins") and value[:2] == ["i", "list"]:
                lists[name] = np.array(value[2])
        counts, bins = lists.get("exp_hist.hist"), lists.get("exp_hist.bins")
        if counts is not None and bins is not None and counts.shape == bins.shape != (0,):
            ends = [-np.inf, *bins[1:-1].tolist(), np.inf]
            exponents[row] = dict(zip(ends, counts.astype(np.int64).tolist(), strict=False))
    figures |= columns
    return exponents


def _tag(cells: pa.Table, key: str) -> Any:
    import pyarrow.compute as pc

    return pc.map_lookup(cells.column("tags"), key, "first")


def _texts(texts: list[str], codes: NDArray[np.int32]) -> Any:
    """Return an Arrow column of interned texts."""
    import pyarrow as pa

    return pa.array(texts, pa.string()).take(pa.array(codes))


def _codes(kinds: list[str], wanted: Sequence[Kind]) -> list[int]:
    return [kinds.index(kind.value) for kind in wanted if kind.value in kinds]


# -- statistics that were not recorded -------------------------------------------------------


def complete_table(reader: RunReader) -> Table:
    """Return the table of a run; compute the statistics that were not recorded."""
    table = table_of(reader)
    tensors = np.array([bool(dtype) for dtype in table.dtypes], np.bool_)[table.dtype]
    rows = np.flatnonzero(tensors & np.isnan(table.column("count")))
    heads = records_of(table.take(rows, HEAD_COLUMNS))
    table.append(summarized(reader.load(head)) for head in heads)
    return table


def summarized(record: Record) -> Record:
    """Return a record with statistics, and with its value only if that is a number."""
    value, stats = record.value, None
    with contextlib.suppress(TypeError):  # dates and strings have no statistics
        stats = summarize_array(as_numpy(value)) if isinstance(value, TensorData) else None
    return msgspec.structs.replace(record, stats=stats, value=number_of(value))
