"""Views of a table as pandas frames, built column by column.

`stats_of` (one flat row per record) and `metrics_of` (training statistics).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tensortap.core.errors import NotFound
from tensortap.core.record import Kind, Record, TensorData
from tensortap.core.rooms import offers
from tensortap.runs.reader import listed
from tensortap.runs.rows import HEAD_COLUMNS, STATISTICS, number_of, records_of
from tensortap.stats import summarize_array
from tensortap.table.kinds import need_pandas
from tensortap.table.table import Table, table_of
from tensortap.values.view import as_numpy

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from tensortap.runs.run_reader import RunReader

    Integers = NDArray[np.int64]

COUNTS = STATISTICS[:5]  # the statistics that are integers


def choose_rank(table: Table, rank: int | str | None) -> tuple[Table, int | None]:
    """Return the table to read and the rank to read of it, None for all of its rows.

    `rank` is a number, ``"all"``, or ``"whole"`` (also None): what the ranks recorded of each
    tensor, merged.
    """
    if rank in (None, "whole"):
        return table.whole(), None
    if rank == "all":
        return table, None
    if rank not in table.ranks():
        ranks = listed(table.ranks())
        raise NotFound(f"no rank {rank}; there is {ranks}, and rank='all' or 'whole'")
    return table, int(rank)


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
        "name": texts_of(table.names, table.name[rows]),
        "kind": texts_of(table.kinds, table.kind[rows]),
        "step": table.step[rows],
        "call": table.call[rows],
        "rank": table.rank[rows].astype(np.int32),
        "dtype": texts_of(table.dtypes, table.dtype[rows]),
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
    table = table_of(origin).index()  # metrics are in it, even if the others are whole tensors
    if names:
        chosen = np.isin(table.name, [i for i, name in enumerate(table.names) if name in names])
    else:
        chosen = np.isin(table.kind, codes_of(table.kinds, [Kind.METRIC]))
    rows = np.flatnonzero(chosen)
    rows = rows[table.has_number(rows)]
    columns: dict[str, Any] = {
        "step": table.step[rows], "rank": table.rank[rows].astype(np.int32),
        "seq": table.seq[rows], "name": texts_of(table.names, table.name[rows]),
        "number": table.column("value")[rows], "row": rows,
    }  # fmt: skip
    long = pd.DataFrame(columns).sort_values(["step", "rank", "seq"], kind="stable")
    long = long.drop_duplicates(["step", "rank", "name"], keep="last")
    for whole in offers("run.metrics"):  # of several ranks
        long = whole(table, long) if names and len(table.ranks()) > 1 else long
    wide = long.pivot(index=["step", "rank"], columns="name", values="number")
    in_order = names or long.sort_values("seq")["name"].unique()
    wide = wide[[name for name in in_order if name in wide.columns]]
    wide.columns.name = None
    return wide.reset_index()


def texts_of(texts: list[str], codes: NDArray[np.int32]) -> Any:
    """Return an Arrow column of interned texts."""
    import pyarrow as pa

    return pa.array(texts, pa.string()).take(pa.array(codes))


def codes_of(kinds: list[str], wanted: Sequence[Kind]) -> list[int]:
    """Return the codes of kinds."""
    return [kinds.index(kind.value) for kind in wanted if kind.value in kinds]


# -- statistics that were not recorded -------------------------------------------------------


def complete_table(reader: RunReader) -> Table:
    """Return the table of a run; compute the statistics that were not recorded."""
    table = table_of(reader)
    if not _incomplete(table.index()).any():
        return table
    rows = np.flatnonzero(_incomplete(table))
    heads = records_of(table.take(rows, HEAD_COLUMNS))
    table.append(summarized(reader.load(head)) for head in heads)
    return table


def _incomplete(table: Table) -> NDArray[np.bool_]:
    """Return which rows are tensors without statistics."""
    tensors = np.array([bool(dtype) for dtype in table.dtypes], np.bool_)[table.dtype]
    return tensors & np.isnan(table.column("count"))


def summarized(record: Record) -> Record:
    """Return a record with statistics, and with its value only if that is a number."""
    value, stats = record.value, None
    with contextlib.suppress(TypeError):  # dates and strings have no statistics
        stats = summarize_array(as_numpy(value)) if isinstance(value, TensorData) else None
    return msgspec.structs.replace(record, stats=stats, value=number_of(value))
