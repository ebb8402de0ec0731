"""Make a LogFrame of a run, a live session or records, column by column."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tensortap.core.record import Kind
from tensortap.rooms.logframe.read import PLACES, has_finfo
from tensortap.runs.rows import DICT_PREFIX, STATISTICS
from tensortap.table.columns import exponent_counts, has_tag
from tensortap.table.frames import COUNTS, choose_rank, codes_of, texts_of
from tensortap.table.kinds import KINDS, need_pandas
from tensortap.table.table import Table, table_of

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Columns = dict[str, NDArray[np.float64]]


_HEALTH_TAGS = ("of", "kind", "quantity")
_HEALTH_KEY = ["name", "kind", "step", "rank"]


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
    ``frame.attrs["left_out"]`` counts them by dtype, and by quantity the numbers of analyses about
    tensors without a row. With `strict`, ``metadata`` has only the columns of the schema; rank and
    call are below ``scalar_stats``, which allows any number. `rank` is as for `choose_rank`.

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

    metadata = _metadata(table, rows, cells)
    statistics = {name: table.column(name)[rows] for name in STATISTICS}
    statistics |= {name: statistics[name].astype(np.int64) for name in COUNTS}
    infinities = statistics["posinfs"] + statistics["neginfs"]
    given = add_stash(statistics, cells)
    health, unplaced = _health_statistics(table, rows, of_rank)
    statistics |= health
    if strict:
        statistics |= {name: metadata.pop(name).to_numpy() for name in PLACES}
    low, counts = _counts(table, rows, infinities, given, low, high)
    # copy=False: nobody else holds the counts, and they may be a gigabyte
    parts = [metadata, pd.DataFrame(statistics), pd.DataFrame(counts.T, copy=False)]
    frame = pd.concat(parts, axis=1)
    bins = (-math.inf, *range(low, low + len(counts) - 2), math.inf)
    labels: list[tuple[str, Any]] = [("metadata", name) for name in metadata.columns]
    labels += [("scalar_stats", name) for name in statistics]
    labels += [("exponent_counts", exponent) for exponent in bins]
    frame.columns = pd.MultiIndex.from_tuples(labels)
    pairs = zip(table.dtypes, left_out.tolist(), strict=True)
    missing = {dtype: count for dtype, count in pairs if count} | unplaced
    if missing:
        frame.attrs["left_out"] = missing
    return frame


def _metadata(table: Table, rows: Integers, cells: pa.Table) -> pd.DataFrame:
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = {
        "name": layer_names(table, rows, cells),
        "type": pc.fill_null(cells.column("type"), ""),
        "tensor_type": tensor_types(table, rows, cells),
        "step": table.step[rows],
        "dtype": np.array(table.dtypes, object)[table.dtype[rows]],
        "rank": table.rank[rows].astype(np.int64),
        "call": table.call[rows],
    }
    return pa.table(columns).to_pandas()


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


def _counts(
    table: Table, rows: Integers, infinities: Any, given: dict[int, dict[float, int]],
    low: int | None, high: int | None,
) -> tuple[int, Integers]:  # fmt: skip
    """Return the lowest exponent and the counts of rows; those that a stash gave replace ours."""
    # a float64 has no exponents beyond these
    bins = {int(n) for own in given.values() for n in own if abs(n) <= 1100}
    if bins:
        if len(given) < len(rows):
            start, counts = exponent_counts(table, rows, low, high)
            bins |= {start, start + len(counts) - 3}
        low, high = min(bins) if low is None else low, max(bins) if high is None else high
    start, counts = exponent_counts(table, rows, low, high)
    counts[-1] += infinities
    last = start + len(counts) - 3
    for row, own in given.items():
        counts[:, row] = 0
        for n, count in own.items():
            counts[0 if n < start else -1 if n > last else int(n) - start + 1, row] += count
    return start, counts


def _health_statistics(
    table: Table, rows: Integers, among: Integers | slice
) -> tuple[Columns, dict[str, int]]:
    """Return the numbers of analyses that belong to rows, by quantity, and how many do not.

    A number belongs to the first row with the name, kind, step and rank that its tags say.
    """
    if Kind.HEALTH.value not in table.kinds:
        return {}, {}
    import pandas as pd
    import pyarrow.compute as pc

    found = np.arange(len(table))[among]
    found = found[table.kind[found] == table.kinds.index(Kind.HEALTH.value)]
    cells = table.take(found, ["tags", "number"])
    texts = {key: pc.map_lookup(cells.column("tags"), key, "first") for key in _HEALTH_TAGS}
    given = pd.DataFrame({
        "quantity": texts["quantity"].to_pandas(),
        "name": _codes(texts["of"].to_pandas(), table.names),
        "kind": _codes(texts["kind"].to_pandas(), table.kinds),
        "step": table.step[found], "rank": table.rank[found],
        "number": cells.column("number").to_numpy(),
    })  # fmt: skip
    places = pd.DataFrame({
        "name": table.name[rows], "kind": table.kind[rows], "step": table.step[rows],
        "rank": table.rank[rows], "row": np.arange(len(rows)),
    })  # fmt: skip
    merged = given.merge(places.drop_duplicates(_HEALTH_KEY), "left", on=_HEALTH_KEY)
    has_row = merged["row"].notna()
    columns: Columns = {}
    for quantity, part in merged[has_row].groupby("quantity", sort=False):
        columns[str(quantity)] = np.full(len(rows), np.nan)
        columns[str(quantity)][part["row"].astype(np.int64)] = part["number"].to_numpy()
    return columns, merged["quantity"][~has_row].value_counts().to_dict()


def _codes(texts: Any, known: list[str]) -> Any:
    return texts.map({text: code for code, text in enumerate(known)}).fillna(-1).astype(np.int64)


# -- rows with statistics, and the names, types and numbers that a LogFrame gives them ------------

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
