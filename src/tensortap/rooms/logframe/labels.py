"""Rows of a table with statistics, and the names, types and numbers that a LogFrame gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tensortap.core.record import Kind
from tensortap.runs.rows import DICT_PREFIX, STATISTICS
from tensortap.table.columns import has_tag
from tensortap.table.frames import codes_of, texts_of
from tensortap.table.kinds import KINDS
from tensortap.table.table import Table

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

_PARAMETERS = (Kind.WEIGHT, Kind.WEIGHT_GRADIENT, Kind.OPTIMISER_STATE)


def rows_with_statistics(
    table: Table, columns: list[str], among: Integers | slice = slice(None)
) -> tuple[Integers, pa.Table]:
    """Return the rows of tensors with statistics by (step, seq, rank), and columns of them.

    Rows that activation checkpointing computed a second time are left out. `columns` must
    contain ``tags``.
    """
    rows = np.arange(len(table))[among]
    tensors = np.isin(table.kind[rows], codes_of(table.kinds, KINDS))
    rows = rows[tensors & ~np.isnan(table.column("count")[rows])]
    rows = rows[np.lexsort((table.rank[rows], table.seq[rows], table.step[rows]))]
    cells = table.take(rows, columns)
    first = ~has_tag(cells, "recompute")
    return (rows, cells) if first.all() else (rows[first], cells.filter(first))


def layer_names(table: Table, rows: Integers, cells: pa.Table) -> Any:
    """Return names as people look for them: ``blocks.0.wq``, not ``blocks.0.wq.weight``."""
    import pyarrow.compute as pc

    # the state of an optimizer has the name of its parameter; its key is part of the type
    name = pc.coalesce(_tag(cells, "parameter"), texts_of(table.names, table.name[rows]))
    is_parameter = np.isin(table.kind[rows], codes_of(table.kinds, _PARAMETERS))
    if not is_parameter.any():
        return name
    return pc.if_else(is_parameter, pc.replace_substring_regex(name, r"(.)\.weight$", r"\1"), name)


def tensor_types(table: Table, rows: Integers, cells: pa.Table) -> Any:
    """Return the kind of every row; for optimizer state with its key."""
    import pyarrow as pa
    import pyarrow.compute as pc

    is_state = np.isin(table.kind[rows], codes_of(table.kinds, [Kind.OPTIMISER_STATE]))
    kind = texts_of(table.kinds, table.kind[rows])
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
