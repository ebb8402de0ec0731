"""Views of a table as pandas frames, built column by column.

`logframe_of` (the LogFrame), `stats_of` (one flat row per record), `metrics_of` (training
statistics) and `formats_of` (what tensors would lose in another dtype).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tensortap.core.errors import NotFound
from tensortap.core.patterns import compile_pattern
from tensortap.core.record import Kind, Record, TensorData
from tensortap.runs.rows import DICT_PREFIX, STATISTICS, number_of
from tensortap.stats import summarize_array
from tensortap.stats.formats import Exponents, limits, shares
from tensortap.table.columns import has_tag
from tensortap.table.health import health_statistics
from tensortap.table.logframe_schema import (
    KINDS,
    PLACES,
    has_finfo,
    need_pandas,
    tensor_type,
)
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
_AT_ONCE = 1 << 16  # tensors whose exponent counts are in memory together


def logframe_of(
    origin: Any,
    *,
    exponents: tuple[int, int] | None = None,
    strict: bool = False,
    rank: int | str | None = "all",
) -> pd.DataFrame:
    """Return the LogFrame of a table, or of anything that `table_of` accepts.

    `exponents` are the first and the last exponent that get a column of their own; None means
    all that occur. Smaller values are counted under ``-inf``, larger ones and infinities under
    ``+inf``. Integer tensors are left out, because the schema requires a dtype with a `finfo`;
    ``frame.attrs["left_out"]`` counts them by dtype. With `strict`, ``metadata`` has only the
    columns of the schema; rank and call are below ``scalar_stats``, which allows any number.
    `rank` is as for `choose_rank`.

    >>> from tensortap.core.record import Record
    >>> from tensortap.stats import summarize_array
    >>> stats = summarize_array(np.array([1.0, 3.0, 0.0], "float32"))
    >>> weight = Record("fc.weight", Kind.WEIGHT, 7, 0, 0, 0, 1, 0, dtype="float32", stats=stats)
    >>> frame = logframe_of([weight], exponents=(0, 2))
    >>> frame["metadata"].loc[0, "name"], frame["exponent_counts"].loc[0].tolist()
    ('fc', [0, 1, 1, 0, 0])
    """
    pd = need_pandas("a LogFrame")
    low, high = _exponent_range(exponents)
    table, rank = choose_rank(table_of(origin), rank)
    of_rank = slice(None) if rank is None else np.flatnonzero(table.rank == rank)
    rows, cells = rows_with_statistics(table, ["type", "tags", "value"], of_rank)
    fits = np.array([has_finfo(dtype) for dtype in table.dtypes], np.bool_)[table.dtype[rows]]
    left_out = np.bincount(table.dtype[rows[~fits]], minlength=len(table.dtypes))
    rows, cells = rows[fits], cells.filter(fits)

    metadata = _metadata(table, rows, cells).to_pandas()
    statistics = {name: table.column(name)[rows] for name in STATISTICS}
    statistics |= {name: statistics[name].astype(np.int64) for name in COUNTS}
    statistics |= stash_statistics(cells)
    statistics |= health_statistics(table, rows)
    if strict:
        statistics |= {name: metadata.pop(name).to_numpy() for name in PLACES}
    low, counts = table.exponent_counts(rows, low, high)
    counts[-1] += statistics["posinfs"] + statistics["neginfs"]
    # copy=False: nobody else holds the counts, and they may be a gigabyte
    parts = [metadata, pd.DataFrame(statistics), pd.DataFrame(counts.T, copy=False)]
    frame = pd.concat(parts, axis=1)
    bins = (-math.inf, *range(low, low + len(counts) - 2), math.inf)
    labels: list[tuple[str, Any]] = [("metadata", name) for name in metadata.columns]
    labels += [("scalar_stats", name) for name in statistics]
    labels += [("exponent_counts", exponent) for exponent in bins]
    frame.columns = pd.MultiIndex.from_tuples(labels)
    if left_out.any():
        pairs = zip(table.dtypes, left_out.tolist(), strict=True)
        frame.attrs["left_out"] = {dtype: count for dtype, count in pairs if count}
    return frame


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


def stash_statistics(cells: pa.Table) -> dict[str, NDArray[np.float64]]:
    """Return the numbers that a `stash=` function gave: name → column."""
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
    for row, (_, items) in zip(rows.tolist(), mappings, strict=True):
        for name, number in items:
            if type(number) in (float, int, bool) and type(name) is str:
                label = f"stash.{name}" if name in STATISTICS else name
                if label not in columns:
                    columns[label] = np.full(cells.num_rows, np.nan)
                columns[label][row] = number
    return columns


def _metadata(table: Table, rows: Integers, cells: pa.Table) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = {
        "name": layer_names(table, rows, cells),
        "type": pc.fill_null(cells.column("type"), ""),
        "tensor_type": tensor_types(table, rows, cells),
        "step": table.step[rows],
        "dtype": _texts(table.dtypes, table.dtype[rows]),
        "rank": table.rank[rows].astype(np.int64),
        "call": table.call[rows],
    }
    return pa.table(columns)


def _exponent_range(exponents: tuple[int, int] | None) -> tuple[int | None, int | None]:
    if exponents is None:
        return None, None
    try:
        low, high = (int(n) for n in exponents)
    except (TypeError, ValueError):
        raise ValueError(f"exponents must be two integers, got {exponents!r}") from None
    if low > high or high - low > 1 << 16:
        raise ValueError(f"exponents must be (lowest, highest), got {exponents!r}")
    return low, high


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
    names = dict.fromkeys(table.names[name] for name in table.name[rows])
    heads = {(r.rank, r.seq): r for _, records in reader.by_name(names) for r in records}
    keys = zip(table.rank[rows].tolist(), table.seq[rows].tolist(), strict=True)
    table.append(_summarized(reader.load(heads[key])) for key in keys)
    return table


def _summarized(record: Record) -> Record:
    """Return a record with statistics, and with its value only if that is a number."""
    value, stats = record.value, None
    with contextlib.suppress(TypeError):  # dates and strings have no statistics
        stats = summarize_array(as_numpy(value)) if isinstance(value, TensorData) else None
    return msgspec.structs.replace(record, stats=stats, value=number_of(value))


# -- other formats -------------------------------------------------------------------------


def formats_of(
    origin: Any,
    dtype: str,
    *,
    name: str | None = None,
    kind: Kind | str | None = None,
    step: int | str | None = None,
) -> pd.DataFrame:
    """Return one row per tensor and step: the shares lost in a dtype, and the best scale.

    Shares are of the nonzero finite values. ``underflow`` becomes zero, ``subnormal`` keeps
    fewer digits, ``overflow`` exceeds the largest number; ``…_at_most`` is larger where the
    exponents leave it open. Multiplied by ``scale = 2**shift``, at most ``scaled`` is lost.
    """
    pd = need_pandas("run.formats()")
    target = limits(dtype)
    table = table_of(origin)
    keys, rows = chosen_rows(table, name, kind, step)
    groups = keys.groupby(["name", "tensor_type", "step"], sort=False)
    tensors = groups.size().reset_index().drop(columns=0)
    group = groups.ngroup().to_numpy()
    order = np.argsort(group, kind="stable")
    starts = range(0, len(tensors), _AT_ONCE)
    parts = []
    for part in np.split(order, np.searchsorted(group[order], starts)[1:]):  # whole groups
        lost = shares(_grouped_exponents(table, rows[part], group[part]), target)
        parts.append(pd.DataFrame(lost))
    frame = pd.concat([tensors, pd.concat(parts, ignore_index=True)], axis=1)
    frame.insert(list(frame.columns).index("scaled"), "scale", np.exp2(frame["shift"]))
    return frame


def chosen_rows(
    table: Table, name: str | None, kind: Kind | str | None, step: int | str | None
) -> tuple[pd.DataFrame, Integers]:
    """Return name, tensor_type and step of the rows with statistics that match, and the rows.

    Without `step` these are the rows of the latest step of each tensor.
    """
    import pyarrow as pa

    rows, cells = rows_with_statistics(table, ["tags"])
    columns = {
        "name": layer_names(table, rows, cells),
        "tensor_type": tensor_types(table, rows, cells),
        "step": table.step[rows],
    }
    keys = pa.table(columns).to_pandas()
    chosen = np.flatnonzero(_matches(keys, name, kind, step))
    if step is None:
        newest = keys.iloc[chosen].groupby(["name", "tensor_type"])["step"].transform("max")
        chosen = chosen[keys["step"].to_numpy()[chosen] == newest.to_numpy()]
    return keys.iloc[chosen].reset_index(drop=True), rows[chosen]


def _matches(keys: Any, name: str | None, kind: Kind | str | None, step: int | str | None) -> Any:
    chosen = np.ones(len(keys), bool)
    if name is not None:
        names, pattern = keys["name"], compile_pattern(name)
        chosen &= names.isin([n for n in names.unique() if pattern.search(n)]).to_numpy(bool)
    if kind is not None:
        wanted = tensor_type(kind.value if isinstance(kind, Kind) else kind)
        types = keys["tensor_type"]
        if wanted is None:
            available = ", ".join(types.unique())
            raise NotFound(f"no kind is called {kind!r}; available: {available or 'none'}")
        chosen &= ((types == wanted) | types.str.startswith(f"{wanted}.")).to_numpy(bool)
    if isinstance(step, int):
        chosen &= (keys["step"] == step).to_numpy()
        if len(keys) and not chosen.any():
            first, last = keys["step"].min(), keys["step"].max()
            raise NotFound(f"nothing at step {step}; steps go from {first} to {last}")
    elif step not in (None, "all"):
        raise NotFound(f"step must be a number or 'all', got {step!r}")
    return chosen


def _grouped_exponents(table: Table, rows: Integers, group: Integers) -> Exponents:
    """Return the exponents of groups of rows; the rows of a group are adjacent."""
    low, counts, smallest, largest = table.exponents(rows)
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    if not len(starts):
        return Exponents(low, counts, smallest, largest)
    # NaN is the extreme of no finite values: any other one counts
    return Exponents(
        low,
        np.add.reduceat(counts, starts, axis=1),
        np.fmin.reduceat(smallest, starts),
        np.fmax.reduceat(largest, starts),
    )
