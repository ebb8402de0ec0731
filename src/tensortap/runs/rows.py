"""Records as rows of the tables of a run, and back: the columns and how they are encoded."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tensortap.core.files import CorruptFile, plain
from tensortap.core.record import Kind, Record, Shard, Summary, TensorData, Value
from tensortap.core.values import map_leaves
from tensortap.runs.arrow import column, numbers, row_indices
from tensortap.runs.layout import VERSION
from tensortap.runs.payloads import has_nbytes
from tensortap.stats.columns import RecordColumns, SummaryColumns

if TYPE_CHECKING:
    import pyarrow as pa

METADATA_KEY = b"tensortap"
STATISTICS = tuple(name for name in Summary.__struct_fields__ if name not in ("first_bin", "bins"))
_SUMMARY = (*STATISTICS, "first_bin", "bins")
COLUMNS = (
    "name", "kind", "step", "call", "seq", "rank", "world_size", "time_ns", "type", "dtype",
    "shape", "shard_shape", "shard_offsets", "shard_placements", "digest", "number", "value",
    "payloads", "tags", "missing", *_SUMMARY,
)  # fmt: skip
HEAD_COLUMNS = [name for name in COLUMNS if name not in ("value", "payloads", "number", "missing")]
"""The columns that `records_of` needs."""

NO_VALUE = b"\xc0"
_FLOAT64 = 0xCB  # of msgpack, before the number in network byte order
"""The value cell of a record without a value."""

DICT_PREFIX = b"\x92\xa1m"
"""The first bytes of the value cell of a dict."""

Row = tuple[Any, ...]
_REQUIRED = (*COLUMNS[:8], "missing")
_KINDS = frozenset(kind.value for kind in Kind)
EXPONENTS = 1 << 15  # longdouble has 16,445 below 0
_HEADS = 64  # sets of columns whose repeated cells are kept
_CELLS = 1 << 16  # records whose repeated cells are kept
_OWN = ("step", "seq", "rank", "world_size", "time_ns")
_NO_SUMMARY = (None,) * len(_SUMMARY)
_encode = msgspec.msgpack.Encoder().encode
_decode_value = msgspec.msgpack.Decoder(Value)


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """The location of a tensor's bytes: a file below ``tensors/`` and a key in it."""

    file: str
    key: str


@functools.cache
def schema() -> pa.Schema:
    """Return the Arrow schema of the tables."""
    import pyarrow as pa

    text, integers = pa.string(), pa.list_(pa.int64())
    types: dict[str, Any] = dict.fromkeys(COLUMNS, pa.int64())
    types |= dict.fromkeys(("name", "kind", "type", "dtype"), text)
    types |= dict.fromkeys(("rank", "world_size", "first_bin"), pa.int32())
    types |= dict.fromkeys(("shape", "shard_shape", "shard_offsets", "bins"), integers)
    types |= dict.fromkeys(("number", *STATISTICS[5:]), pa.float64())
    types |= {
        "shard_placements": pa.list_(text),
        "digest": pa.binary(),
        "value": pa.binary(),
        "payloads": pa.list_(pa.struct([("file", text), ("key", text)])),
        "tags": pa.map_(text, text),
        "missing": pa.bool_(),
    }
    required = {*COLUMNS[:8], "missing"}
    fields = [pa.field(name, kind, name not in required) for name, kind in types.items()]
    return pa.schema(fields, metadata={METADATA_KEY: json.dumps({"format": VERSION}).encode()})


# -- from records to rows --------------------------------------------------------------------


def encode_inline(value: Value) -> bytes | None:
    """Return the value cell of a value without large payloads; None if it has any."""
    try:
        return _encode(value)
    except TypeError:
        return None


def encode_value(value: Value, external: Callable[[Any], int]) -> bytes:
    """Return the value cell; `external` takes each large payload and returns its index."""
    return msgspec.msgpack.Encoder(enc_hook=external).encode(value)


def row_of(
    record: Record, value: bytes | None, payloads: list[Payload], missing: bool = False
) -> Row:
    """Return the row of a record whose value is already encoded."""
    shard = record.shard
    stats = record.stats
    return (
        record.name, record.kind, record.step, record.call, record.seq, record.rank,
        record.world_size, record.time_ns, record.type, record.dtype, record.shape,
        shard.global_shape if shard else None,
        shard.offsets if shard else None,
        shard.placements if shard else None,
        record.digest, number_of(record.value), value,
        [{"file": p.file, "key": p.key} for p in payloads] or None,
        list(record.tags.items()) or None, missing,
        *(msgspec.structs.astuple(stats) if stats else _NO_SUMMARY),
    )  # fmt: skip


def number_of(value: Value) -> float | None:
    """Return a scalar as a float, so that any tool can plot it; None for anything else."""
    if isinstance(value, (float, int)):
        try:
            return float(value)
        except OverflowError:
            return None
    if isinstance(value, TensorData) and value.shape == () and type(value.data) is bytes:
        code = _STRUCT_CODES.get(value.dtype)
        if code is not None:
            return float(struct.unpack(code, value.data)[0])
        if value.dtype == "bfloat16":
            return float(struct.unpack("<f", b"\0\0" + value.data)[0])
    return None


_STRUCT_CODES = {
    "bool": "?", "int8": "<b", "uint8": "<B", "int16": "<h", "uint16": "<H", "int32": "<i",
    "uint32": "<I", "int64": "<q", "uint64": "<Q", "float16": "<e", "float32": "<f",
    "float64": "<d",
}  # fmt: skip


def batch_of(rows: list[Row], columns: pa.Schema) -> pa.RecordBatch:
    """Return rows as an Arrow batch."""
    import pyarrow as pa

    by_column = list(zip(*rows, strict=True))
    arrays = [column(by_column[i], field.type) for i, field in enumerate(columns)]
    return pa.RecordBatch.from_arrays(arrays, schema=columns)


def joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Return batches as one: each costs readers some time."""
    import pyarrow as pa

    if len(batches) == 1:
        return batches[0]
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def is_number(record: Record) -> bool:
    """Return whether a record is a number about a step, and nothing else."""
    is_plain = record.kind is Kind.METRIC and record.type == "builtins.float"
    return is_plain and type(record.value) is float and not (record.call or record.tags)


class ColumnEncoder:
    """Turns columns of records into Arrow batches; what repeats is encoded once."""

    def __init__(self, columns: pa.Schema) -> None:
        self._schema = columns
        self._known: dict[int, tuple[tuple[Record, ...], list[pa.Array]]] = {}
        self._heads: list[Record] = []  # kept, so that no others get their ids
        self._places: dict[int, int] = {}  # in the table, by the identities of heads
        self._table: list[pa.Array] = []  # the cells of all heads, by column
        self._of_numbers: dict[str, Record] = {}  # heads, by name

    def batch_of(self, found: RecordColumns) -> pa.RecordBatch:
        """Return records as an Arrow batch."""
        own = found.step, found.seqs, found.rank, found.world_size, found.time_ns
        return self._batch(found.heads, own, found.stats, found.numbers)

    def batch_of_numbers(self, records: Sequence[Record]) -> pa.RecordBatch:
        """Return records of which `is_number` is true as an Arrow batch."""
        for name in {record.name for record in records}.difference(self._of_numbers):
            self._of_numbers[name] = Record(name, Kind.METRIC, 0, 0, 0, 0, 0, 0, "builtins.float")
        heads = tuple([self._of_numbers[record.name] for record in records])
        fields = [(r.step, r.seq, r.rank, r.world_size, r.time_ns) for r in records]
        values = np.array([record.value for record in records], "f8")
        return self._batch(heads, list(zip(*fields, strict=True)), None, values.tobytes())

    def _batch(
        self, heads: tuple[Record, ...], own: Any, stats: SummaryColumns | None, numbers: bytes
    ) -> pa.RecordBatch:
        """Return records of heads with their `own` steps, seqs, ranks, world sizes and times."""
        import pyarrow as pa

        count, arrays = len(heads), list(self._repeated(heads))
        for name, value in zip(_OWN, own, strict=True):
            index = COLUMNS.index(name)
            kind = self._schema.field(index).type
            cells = np.full(count, value, kind.to_pandas_dtype())
            arrays[index] = pa.Array.from_buffers(kind, count, [None, pa.py_buffer(cells)])
        if stats is not None:
            arrays += self._statistics(stats, count)
        else:
            arrays[COLUMNS.index("number")], arrays[COLUMNS.index("value")] = _cells(numbers)
            arrays += [pa.nulls(count, self._schema.field(name).type) for name in _SUMMARY]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _repeated(self, heads: tuple[Record, ...]) -> list[pa.Array]:
        """Return all columns but the statistics, of records without what differs."""
        known = self._known.get(id(heads))
        if known is None:
            if len(self._known) >= _HEADS:
                self._known.clear()
            # the heads are kept, so that no others get their id
            known = self._known[id(heads)] = heads, self._taken(heads)
        return known[1]

    def _taken(self, heads: tuple[Record, ...]) -> list[pa.Array]:
        if len(self._heads) > _CELLS:
            self._heads, self._places, self._table = [], {}, []
        new = list({id(head): head for head in heads if id(head) not in self._places}.values())
        if new:
            self._learn(new)
        places = np.array([self._places[id(head)] for head in heads])
        if (np.diff(places) == 1).all():
            return [cells.slice(places[0], len(places)) for cells in self._table]
        indices = row_indices(places)
        return [cells.take(indices) for cells in self._table]

    def _learn(self, heads: list[Record]) -> None:
        import pyarrow as pa

        rows = [row_of(head, NO_VALUE, []) for head in heads]
        by_column = list(zip(*rows, strict=True))[: -len(_SUMMARY)]
        types = [field.type for field in self._schema]
        arrays = [column(cells, kind) for cells, kind in zip(by_column, types, strict=False)]
        both = zip(self._table, arrays, strict=True) if self._table else ()
        self._table = [pa.concat_arrays(pair) for pair in both] or arrays
        self._places.update((id(head), i) for i, head in enumerate(heads, len(self._heads)))
        self._heads += heads

    def _statistics(self, stats: SummaryColumns, count: int) -> list[pa.Array]:
        import pyarrow as pa

        counts, figures = pa.py_buffer(stats.counts), pa.py_buffer(stats.figures)
        size = 8 * count
        arrays = [
            pa.Array.from_buffers(kind, count, [None, whole.slice(start, size)])
            for kind, whole in ((pa.int64(), counts), (pa.float64(), figures))
            for start in range(0, whole.size, size)
        ]
        first = pa.py_buffer(stats.first_bins)
        arrays.append(pa.Array.from_buffers(pa.int32(), count, [None, first]))
        bins = pa.py_buffer(stats.bins)
        items = pa.Array.from_buffers(pa.int64(), bins.size // 8, [None, bins])
        ends = pa.py_buffer(stats.ends)
        kind = self._schema.field("bins").type
        arrays.append(pa.Array.from_buffers(kind, count, [None, ends], children=[items]))
        return arrays


def _cells(numbers: bytes) -> tuple[pa.Array, pa.Array]:
    """Return the columns `number` and `value` of float64, as `number_of` and `encode_inline` do."""
    import pyarrow as pa

    count = len(numbers) // 8
    encoded = np.full((count, 9), _FLOAT64, np.uint8)
    encoded[:, 1:] = np.frombuffer(numbers, "f8").astype(">f8").view(np.uint8).reshape(count, 8)
    ends = 9 * np.arange(count + 1, dtype=np.int32)
    values = [None, pa.py_buffer(ends), pa.py_buffer(encoded)]
    return (
        pa.Array.from_buffers(pa.float64(), count, [None, pa.py_buffer(numbers)]),
        pa.Array.from_buffers(pa.binary(), count, values),
    )


# -- from rows to records --------------------------------------------------------------------


def records_of(heads: pa.Table) -> list[Record]:
    """Return the records of rows with HEAD_COLUMNS; their values have to be loaded separately."""
    if heads.column("count").null_count == heads.num_rows:
        heads = heads.drop_columns(list(_SUMMARY))
    names = heads.column_names
    columns = [heads.column(name).to_pylist() for name in names]
    return [_record(dict(zip(names, cells, strict=True))) for cells in zip(*columns, strict=True)]


def _record(row: dict[str, Any]) -> Record:
    shard = stats = None
    if row["shard_shape"] is not None:
        shard = Shard(
            tuple(row["shard_shape"]),
            tuple(row["shard_offsets"] or ()),
            tuple(row["shard_placements"] or ()),
        )
    if row.get("count") is not None:
        figures = {name: row[name] for name in STATISTICS}
        if None in figures.values():
            raise CorruptFile("a record has only some of the statistics: the run is damaged")
        stats = Summary(**figures, first_bin=row["first_bin"] or 0, bins=tuple(row["bins"] or ()))
    name, kind, step, call, seq, rank, size, time_ns = (row[column] for column in COLUMNS[:8])
    return Record(
        name, Kind(kind), step, call, seq, rank, size, time_ns, row["type"] or "",
        row["dtype"] or "", tuple(row["shape"] or ()), shard, row["digest"], None, stats,
        dict(row["tags"] or ()),
    )  # fmt: skip


def decode_value(data: bytes | None, payloads: Sequence[memoryview] = ()) -> Value:
    """Return the value of a value cell; its large tensors refer to `payloads` by index."""
    if data is None:
        return None
    try:
        value: Value = _decode_value.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise CorruptFile(f"a value of the run cannot be read: {plain(str(error))}") from None

    def fill(leaf: Value) -> Value:
        if not isinstance(leaf, TensorData):
            return leaf
        if type(leaf.data) is bytes:
            check(leaf, len(leaf.data))
            return leaf
        if not (type(leaf.data) is int and 0 <= leaf.data < len(payloads)):
            raise CorruptFile(
                f"a {plain(leaf.dtype)} tensor refers to a payload that is not in its row"
            )
        view = payloads[leaf.data]
        check(leaf, view.nbytes)
        return TensorData(leaf.framework, leaf.dtype, leaf.shape, view)

    def check(leaf: TensorData, nbytes: int) -> None:
        if not has_nbytes(leaf.dtype, leaf.shape, nbytes):
            shape = plain(str(leaf.shape), 80)
            raise CorruptFile(f"a {plain(leaf.dtype)} tensor of shape {shape} has {nbytes} bytes")

    return map_leaves(fill, value)


# -- checks of tables that somebody else may have written ------------------------------------


def unreadable() -> tuple[type[Exception], ...]:
    """Return the errors that pyarrow raises for damaged files."""
    import pyarrow as pa

    return (pa.ArrowException, EOFError, OSError, ValueError, TypeError, MemoryError)


def check_columns(path: Path, found: pa.Schema) -> None:
    """Raise CorruptFile unless a table has the columns of the format."""
    if found.equals(schema()):
        return
    for field in schema():
        if found.get_field_index(field.name) < 0 or found.field(field.name).type != field.type:
            raise CorruptFile(f"{path} is not a table of a run: its column {field.name} is missing")


def check_rows(path: Path, footer: Any, rows: int) -> None:
    """Raise CorruptFile unless a Parquet file has so many rows, in groups that all have some."""
    sizes = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
    if min(sizes, default=1) < 1:
        raise CorruptFile(f"{path} has row groups without rows")
    if not sum(sizes) == footer.num_rows == rows:
        raise CorruptFile(f"{path} has {footer.num_rows} rows, not {rows} as it says")


def validated(rows: Any, rank: int | None) -> Any:
    """Return rows after checking each of their bytes: Arrow trusts offsets and would crash.

    With a `rank`, all of them must be of it.
    """
    import pyarrow.compute as pc

    rows.validate(full=True)
    names = rows.schema.names
    for name in _REQUIRED:
        if name in names and rows.column(name).null_count:
            raise ValueError(f"the column {name} has empty cells")
    if rank is not None and "rank" in names and (numbers(rows.column("rank")) != rank).any():
        raise ValueError(f"it has rows of other ranks than {rank}")
    if "kind" in names and not _KINDS.issuperset(rows.column("kind").unique().to_pylist()):
        raise ValueError("it has records of unknown kinds")
    if "first_bin" in names and "bins" in names:
        first = np.nan_to_num(numbers(rows.column("first_bin")))
        last = first + np.nan_to_num(numbers(pc.list_value_length(rows.column("bins"))))
        if (first < -EXPONENTS).any() or (last > EXPONENTS).any():
            raise ValueError("it counts exponents that no number has")
    return rows
