"""Frames of numerics, built column by column: nothing here loops over rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tensortap.record import Kind, Record, TensorData
from tensortap.runs import rows as run_rows
from tensortap.table.logframe_schema import KINDS, has_finfo, need_pandas

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import pyarrow as pa
    from numpy.typing import NDArray

    Counts = NDArray[np.int64]

COLUMNS = (
    "name", "kind", "type", "step", "call", "seq", "rank", "dtype", "number", "tags", "value",
    "missing", *run_rows.STATISTICS, "first_bin", "bins",
)  # fmt: skip
_PARAMETERS = (Kind.WEIGHT, Kind.WEIGHT_GRADIENT, Kind.OPTIMISER_STATE)
_MAPPING = b"\x92\xa1m"  # how the value column begins where it holds a dict


def logframe_of(
    source: Iterable[Record] | pa.Table, *, exponents: tuple[int, int] | None = None
) -> pd.DataFrame:
    """The LogFrame of records with statistics, or of the table of a run.

    `exponents` are the first and the last bin that get a column of their own; None is all that
    occur. Values below them are counted under ``-inf``, those above, and infinities, under
    ``+inf``. Tensors of integers are left out, as the schema wants a dtype that has a `finfo`;
    ``frame.attrs["left_out"]`` says how many.

    >>> from tensortap.stats import summarize_array
    >>> import numpy as np
    >>> stats = summarize_array(np.array([1.0, 3.0, 0.0], "float32"))
    >>> weight = Record("fc.weight", Kind.WEIGHT, 7, 0, 0, 0, 1, 0, dtype="float32", stats=stats)
    >>> frame = logframe_of([weight], exponents=(0, 2))
    >>> frame["metadata"].loc[0, "name"], frame["exponent_counts"].loc[0].tolist()
    ('fc', [0, 1, 1, 0, 0])
    """
    pd = need_pandas("a LogFrame")
    import numpy as np
    import pyarrow.compute as pc

    low, high = _range(exponents)
    table = with_statistics(source)
    known = {d: has_finfo(d or "") for d in pc.unique(table.column("dtype")).to_pylist()}
    left_out = _left_out(table, [d for d, fits in known.items() if not fits])
    if left_out:
        table = table.filter(_is_in(table.column("dtype"), [d for d in known if known[d]]))
    place = _places(table)
    order = None if place is None else np.argsort(place)
    heads = table.select([c for c in table.column_names if c != "bins"])
    if order is not None:
        heads = heads.take(order)

    metadata = _metadata(heads).to_pandas()
    figures = heads.select(run_rows.STATISTICS).to_pandas()
    extra = extra_statistics(heads)
    lowest, counts = histogram(table, low, high, place)
    counts[-1] += figures["posinfs"].to_numpy(np.int64) + figures["neginfs"].to_numpy(np.int64)
    # copy=False: what nobody else holds need not be copied, and it may be a gigabyte
    parts = [metadata, figures, pd.DataFrame(extra), pd.DataFrame(counts.T, copy=False)]
    frame = pd.concat(parts, axis=1)
    labels: list[tuple[str, Any]] = [("metadata", name) for name in metadata.columns]
    labels += [("scalar_stats", name) for name in (*figures.columns, *extra)]
    bins = range(lowest, lowest + len(counts) - 2)
    labels += [("exponent_counts", n) for n in (-math.inf, *bins, math.inf)]
    frame.columns = pd.MultiIndex.from_tuples(labels)
    if left_out:
        frame.attrs["left_out"] = left_out
    return frame


def metrics_of(source: Iterable[Record] | pa.Table, names: Sequence[str] = ()) -> pd.DataFrame:
    """Training statistics: a row a step and rank, a column a metric.

    Of `names`, any records that are single numbers are taken. Where a metric came twice in a
    step, the later one stands.

    >>> metrics_of([Record("loss", Kind.METRIC, 3, 0, 0, 0, 1, 0, value=0.5)])
       step  rank  loss
    0     3     0   0.5
    """
    need_pandas("a frame of metrics")
    import pyarrow.compute as pc

    table = _table(source)
    chosen = (
        _is_in(table.column("name"), list(names))
        if names
        else pc.equal(table.column("kind"), Kind.METRIC.value)
    )
    chosen = pc.and_(chosen, pc.is_valid(table.column("number")))
    chosen = pc.and_(chosen, pc.invert(table.column("missing")))
    columns = ["step", "rank", "seq", "name", "number"]
    found = table.filter(chosen).select(columns).to_pandas()
    found = found.sort_values(["step", "rank", "seq"], kind="stable")
    found = found.drop_duplicates(["step", "rank", "name"], keep="last")
    wide = found.pivot(index=["step", "rank"], columns="name", values="number")
    in_order = names or found.sort_values("seq")["name"].unique()
    wide = wide[[name for name in in_order if name in wide.columns]]
    wide.columns.name = None
    return wide.reset_index()


def table_of(records: Iterable[Record]) -> pa.Table:
    """Records as the table of a run has them, as far as frames need it; no tensors."""
    import pyarrow as pa

    encode = msgspec.msgpack.Encoder(enc_hook=lambda _: None).encode
    wanted = [run_rows.COLUMNS.index(name) for name in COLUMNS]
    rows = []
    for record in records:
        value = record.value
        data = None if value is None or isinstance(value, TensorData) else encode(value)
        row = run_rows.row_of(record, data, [])
        rows.append([row[i] for i in wanted])
    schema = run_rows.schema()
    fields = [schema.field(name) for name in COLUMNS]
    turned = list(zip(*rows, strict=True)) or [()] * len(fields)
    columns = [pa.array(column, f.type) for column, f in zip(turned, fields, strict=True)]
    return pa.table(columns, schema=pa.schema(fields))


def with_statistics(source: Iterable[Record] | pa.Table) -> pa.Table:
    """The rows that have statistics and count: no metrics, nothing that was computed again."""
    import pyarrow.compute as pc

    table = _table(source)
    chosen = pc.and_(pc.is_valid(table.column("count")), pc.invert(table.column("missing")))
    chosen = pc.and_(chosen, _is_in(table.column("kind"), [k.value for k in KINDS]))
    # activation checkpointing runs a module a second time: the same values
    chosen = pc.and_(chosen, pc.is_null(tag(table, "recompute")))
    return table if pc.all(chosen).as_py() else table.filter(chosen)


def tag(table: pa.Table, key: str) -> Any:
    """A tag of every row, null where it has none."""
    import pyarrow.compute as pc

    return pc.map_lookup(table.column("tags"), key, "first")


def tensor_types(table: pa.Table) -> Any:
    """The kind of every row; of an optimiser's state with its key."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = table.column("kind")
    none = pa.scalar(None, pa.string())
    state = pc.if_else(pc.equal(kind, Kind.OPTIMISER_STATE.value), tag(table, "state"), none)
    return pc.binary_join_element_wise(kind, state, ".", null_handling="skip")


def layer_names(table: pa.Table) -> Any:
    """Names as people look for them: ``blocks.0.wq``, not ``blocks.0.wq.weight``."""
    import pyarrow.compute as pc

    # the state of an optimiser goes by its parameter; its key is part of the type
    name = pc.coalesce(tag(table, "parameter"), table.column("name"))
    parameter = _is_in(table.column("kind"), [k.value for k in _PARAMETERS])
    short = pc.replace_substring_regex(name, r"(.)\.weight$", r"\1")
    return pc.if_else(parameter, short, name)


def histogram(
    table: pa.Table,
    low: int | None = None,
    high: int | None = None,
    place: NDArray[np.int64] | None = None,
) -> tuple[int, Counts]:
    """The lowest bin, and the counts of all rows of the table: first what is below, last above.

    A column of the result is a row of the table; `place` says which.
    """
    import numpy as np

    if low is None or high is None:
        low, high = _occurring(table)
    counts = np.zeros((high - low + 3, table.num_rows), np.int64)
    start = 0
    # batch by batch: the offsets of one list array are 32 bits
    for batch in table.select(["first_bin", "bins"]).to_batches():
        lists = batch.column("bins")
        lengths = np.diff(lists.offsets.to_numpy()) if len(lists) else np.zeros(0, np.int64)
        values = lists.flatten().to_numpy()
        first = batch.column("first_bin").fill_null(0).to_numpy().astype(np.int64)
        ends = np.cumsum(lengths, dtype=np.int64)
        bins = np.arange(len(values)) - np.repeat(ends - lengths - first, lengths)
        where = np.repeat(np.arange(start, start + batch.num_rows), lengths)
        if place is not None:
            where = place[where]
        inside = (bins >= low) & (bins <= high)
        if inside.all():
            counts[bins - low + 1, where] = values
        else:
            counts[bins[inside] - low + 1, where[inside]] = values[inside]
            for beyond, side in ((bins < low, counts[0]), (bins > high, counts[-1])):
                np.add.at(side, where[beyond], values[beyond])
        start += batch.num_rows
    return low, counts


def _occurring(table: pa.Table) -> tuple[int, int]:
    import pyarrow.compute as pc

    length = pc.list_value_length(table.column("bins"))
    first = table.column("first_bin").filter(pc.greater(length, 0))
    if not len(first):
        return 0, 0
    last = pc.add(first, pc.cast(length.filter(pc.greater(length, 0)), first.type))
    return pc.min(first).as_py(), pc.max(last).as_py() - 1


def _range(exponents: tuple[int, int] | None) -> tuple[int | None, int | None]:
    if exponents is None:
        return None, None
    try:
        low, high = (int(n) for n in exponents)
    except (TypeError, ValueError):
        raise ValueError(f"exponents are two whole numbers, not {exponents!r}") from None
    if low > high or high - low > 1 << 16:
        raise ValueError(f"exponents go from a lower to a higher one, not {exponents!r}")
    return low, high


def _table(source: Any) -> pa.Table:
    return source if hasattr(source, "column_names") else table_of(source)


def _is_in(column: Any, values: list[str]) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.is_in(column, pa.array(values, pa.string()))


def _left_out(table: pa.Table, dtypes: list[str]) -> dict[str, int]:
    import pyarrow.compute as pc

    column = table.column("dtype")
    return {d or "": pc.sum(_is_in(column, [d])).as_py() for d in dtypes} if dtypes else {}


def _places(table: pa.Table) -> NDArray[np.int64] | None:
    """Where each row goes in the order (step, seq, rank); None if it is there already."""
    import numpy as np

    step, seq, rank = (table.column(c).to_numpy() for c in ("step", "seq", "rank"))
    order = np.lexsort((rank, seq, step))
    if (order[:-1] < order[1:]).all():
        return None
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return place


def _metadata(heads: pa.Table) -> pa.Table:
    import pyarrow as pa

    columns = {
        "name": layer_names(heads),
        "type": heads.column("type").fill_null(""),
        "tensor_type": tensor_types(heads),
        "step": heads.column("step"),
        "dtype": heads.column("dtype"),
        "rank": heads.column("rank").cast(pa.int64()),
        "call": heads.column("call"),
    }
    return pa.table(columns)


def extra_statistics(heads: pa.Table) -> dict[str, NDArray[np.float64]]:
    """Numbers that a `stash=` function gave: a column a name."""
    import numpy as np
    import pyarrow.compute as pc

    mapped = pc.starts_with(heads.column("value"), pattern=_MAPPING).fill_null(False)
    rows = np.flatnonzero(mapped.to_numpy())
    if not len(rows):
        return {}
    values = heads.column("value").filter(mapped).to_pylist()
    # one array of all of them: a decoder call a row would be most of the time
    header = b"\xdd" + len(values).to_bytes(4, "big")
    found: dict[str, tuple[list[int], list[float]]] = {}
    for row, (_, items) in zip(
        rows.tolist(), msgspec.msgpack.decode(header + b"".join(values)), strict=True
    ):
        for name, number in items:
            if type(number) in (float, int, bool) and type(name) is str:
                where, numbers = found.setdefault(name, ([], []))
                where.append(row)
                numbers.append(number)
    extra = {}
    for name, (where, numbers) in found.items():
        column = np.full(heads.num_rows, np.nan)
        column[where] = numbers
        extra[f"stash.{name}" if name in run_rows.STATISTICS else name] = column
    return extra
