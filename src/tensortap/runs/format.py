"""The run on disk: its folders, its tables, and how a record becomes a row. See docs/format.md."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tensortap.errors import TensortapError
from tensortap.record import Kind, Record, Shard, Summary, TensorData, Value
from tensortap.runs.arrow import column
from tensortap.runs.payloads import sync_folder

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 1
RUN_FILE = "run.json"
TAIL = "tail.arrows"
GROUP = 8192  # rows of a row group
STATISTICS = tuple(name for name in Summary.__struct_fields__ if name not in ("first_bin", "bins"))
_COUNTS = STATISTICS[:5]
_KEY = b"tensortap"


class NotARun(TensortapError):
    """A folder that is not a run, or one that this version cannot read."""


class RunInfo(msgspec.Struct, frozen=True):
    """What run.json says."""

    format: int
    id: str
    tensortap: str
    world_size: int
    started: str
    time_zone: str
    ended: str | None = None


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor of a record lies: a file below ``tensors/`` and its key there."""

    file: str
    key: str


def rank_name(rank: int) -> str:
    """The name of a rank's folder."""
    return f"{rank:05d}"


def records_folder(run: Path, rank: int) -> Path:
    """Where the tables of a rank are."""
    return run / "records" / rank_name(rank)


def receipt_file(run: Path, rank: int) -> Path:
    """Where a rank says, when it ends, what the run has cost it."""
    return records_folder(run, rank) / "receipt.json"


def tensors_folder(run: Path, rank: int) -> Path:
    """Where the payloads of a rank are."""
    return run / "tensors" / rank_name(rank)


def part_name(number: int) -> str:
    """The name of a sealed table."""
    return f"{number:04d}.parquet"


def write_json(path: Path, content: object) -> None:
    """Write a file in one piece: whoever reads it sees the old or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    draft.replace(path)


def read_info(run: Path) -> RunInfo:
    """What run.json says; NotARun when it is not there, or from a newer tensortap."""
    try:
        text = (run / RUN_FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        held = sorted(path.parent.name for path in run.glob(f"*/{RUN_FILE}"))
        inside = f"; the latest of {len(held):,} runs in it is {run / held[-1]}" if held else ""
        raise NotARun(f"{run} is no run: it has no {RUN_FILE}{inside}") from None
    try:
        version = json.loads(text)["format"]
    except (ValueError, KeyError, TypeError):
        raise NotARun(f"{run / RUN_FILE} cannot be read: it is damaged") from None
    if not isinstance(version, int) or version > VERSION:
        raise NotARun(
            f"{run} has format {version}, this tensortap reads up to {VERSION}: upgrade tensortap"
        )
    try:
        return msgspec.json.decode(text, type=RunInfo)
    except msgspec.MsgspecError as error:
        raise NotARun(f"{run / RUN_FILE} cannot be read: {error}") from None


_RANK = re.compile(r"\d{5,}")


def ranks_of(run: Path) -> list[int]:
    """The ranks that have written into a run."""
    folder = run / "records"
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if _RANK.fullmatch(p.name))


# -- rows ----------------------------------------------------------------------------------


def schema() -> pa.Schema:
    """The columns of the tables."""
    import pyarrow as pa

    text, whole, real = pa.string(), pa.int64(), pa.float64()
    numbers = pa.list_(whole)
    fields = [
        pa.field("name", text, nullable=False),
        pa.field("kind", text, nullable=False),
        pa.field("step", whole, nullable=False),
        pa.field("call", whole, nullable=False),
        pa.field("seq", whole, nullable=False),
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("world_size", pa.int32(), nullable=False),
        pa.field("time_ns", whole, nullable=False),
        pa.field("type", text),
        pa.field("dtype", text),
        pa.field("shape", numbers),
        pa.field("shard_shape", numbers),
        pa.field("shard_offsets", numbers),
        pa.field("shard_placements", pa.list_(text)),
        pa.field("digest", pa.binary()),
        pa.field("number", real),
        pa.field("value", pa.binary()),
        pa.field("payloads", pa.list_(pa.struct([("file", text), ("key", text)]))),
        pa.field("tags", pa.map_(text, text)),
        pa.field("missing", pa.bool_(), nullable=False),
    ]
    fields += [pa.field(name, whole if name in _COUNTS else real) for name in STATISTICS]
    fields += [pa.field("first_bin", pa.int32()), pa.field("bins", numbers)]
    return pa.schema(fields, metadata={_KEY: json.dumps({"format": VERSION}).encode()})


COLUMNS = (
    "name", "kind", "step", "call", "seq", "rank", "world_size", "time_ns", "type", "dtype",
    "shape", "shard_shape", "shard_offsets", "shard_placements", "digest", "number", "value",
    "payloads", "tags", "missing", *STATISTICS, "first_bin", "bins",
)  # fmt: skip
Row = tuple[Any, ...]
_encode = msgspec.msgpack.Encoder().encode
_decode_value = msgspec.msgpack.Decoder(Value)
_NO_STATISTICS = (None,) * (len(STATISTICS) + 2)


def encode_inline(value: Value) -> bytes | None:
    """The value column of a value that is small throughout; None if a payload is large."""
    try:
        return _encode(value)
    except TypeError:
        return None


def encode_value(value: Value, external: Callable[[Any], int]) -> bytes:
    """The value column: the neutral tree in MessagePack, large payloads as indices."""
    return msgspec.msgpack.Encoder(enc_hook=external).encode(value)


def row_of(
    record: Record, value: bytes | None, payloads: list[Payload], missing: bool = False
) -> Row:
    """The row of a record whose value is encoded already."""
    shard = record.shard
    stats = record.stats
    return (
        record.name,
        record.kind.value,
        record.step,
        record.call,
        record.seq,
        record.rank,
        record.world_size,
        record.time_ns,
        record.type,
        record.dtype,
        record.shape,
        shard.global_shape if shard else None,
        shard.offsets if shard else None,
        shard.placements if shard else None,
        record.digest,
        number_of(record.value),
        value,
        [{"file": p.file, "key": p.key} for p in payloads] or None,
        list(record.tags.items()) or None,
        missing,
        *(msgspec.structs.astuple(stats) if stats else _NO_STATISTICS),
    )


def number_of(value: Value) -> float | None:
    """A scalar as a number, so that any tool can plot it."""
    if isinstance(value, (float, int)):
        try:
            return float(value)
        except OverflowError:
            return None
    if isinstance(value, TensorData) and value.shape == () and type(value.data) is bytes:
        return _scalar(value)
    return None


def _scalar(tensor: TensorData) -> float | None:
    import struct

    code = _CODES.get(tensor.dtype)
    if code is not None:
        return float(struct.unpack(code, tensor.data)[0])
    if tensor.dtype == "bfloat16":
        return float(struct.unpack("<f", b"\0\0" + tensor.data)[0])
    return None


_CODES = {
    "bool": "?", "int8": "<b", "uint8": "<B", "int16": "<h", "uint16": "<H", "int32": "<i",
    "uint32": "<I", "int64": "<q", "uint64": "<Q", "float16": "<e", "float32": "<f",
    "float64": "<d",
}  # fmt: skip


def batch_of(rows: list[Row], columns: pa.Schema) -> pa.RecordBatch:
    """Rows as a batch of Arrow."""
    import pyarrow as pa

    turned = list(zip(*rows, strict=True))
    arrays = [column(turned[i], field.type) for i, field in enumerate(columns)]
    return pa.RecordBatch.from_arrays(arrays, schema=columns)


def record_of(row: dict[str, Any], value: Value = None) -> Record:
    """The record of a row; its value has to be loaded apart."""
    shard = None
    if row.get("shard_shape") is not None:
        shard = Shard(
            tuple(row["shard_shape"]),
            tuple(row["shard_offsets"] or ()),
            tuple(row["shard_placements"] or ()),
        )
    stats = None
    if row.get("count") is not None:
        figures = {name: row[name] for name in STATISTICS}
        bins = tuple(row["bins"] or ())
        stats = Summary(**figures, first_bin=row["first_bin"] or 0, bins=bins)
    return Record(
        row["name"],
        Kind(row["kind"]),
        row["step"],
        row["call"],
        row["seq"],
        row["rank"],
        row["world_size"],
        row["time_ns"],
        row["type"] or "",
        row["dtype"] or "",
        tuple(row["shape"] or ()),
        shard,
        row["digest"],
        value,
        stats,
        dict(row["tags"] or ()),
    )


def decode_value(data: bytes | None) -> Value:
    """The tree of a value column; tensors in payload files still have their index as data."""
    if data is None:
        return None
    found: Value = _decode_value.decode(data)
    return found


# -- what a sealed table says of itself ----------------------------------------------------


class Contents(msgspec.Struct, frozen=True):
    """In the metadata of a sealed table: what is in it, so that it need not be read to know."""

    rows: int
    missing: int
    first_seq: int
    last_seq: int
    first_step: int
    last_step: int
    names: dict[str, dict[str, int]]  # name → kind → how many records


class _Count:
    """Counts what the batches of a table hold."""

    def __init__(self) -> None:
        self.rows = self.missing = 0
        self._seqs: list[int] = []
        self._steps: list[int] = []
        self._names: dict[str, dict[str, int]] = {}

    def add(self, table: pa.Table) -> None:
        import pyarrow.compute as pc

        gone = table.column("missing")
        here = table.select(["name", "kind", "step", "seq"]).filter(pc.invert(gone))
        self.rows += table.num_rows
        self.missing += table.num_rows - here.num_rows
        if not here.num_rows:
            return
        for name, found in (("seq", self._seqs), ("step", self._steps)):
            both = pc.min_max(here.column(name)).as_py()
            found += (both["min"], both["max"])
        for name, kinds in count_names(here).items():
            held = self._names.setdefault(name, {})
            for kind, count in kinds.items():
                held[kind] = held.get(kind, 0) + count

    def contents(self) -> Contents:
        seqs, steps = self._seqs or [0], self._steps or [0]
        return Contents(
            self.rows, self.missing, min(seqs), max(seqs), min(steps), max(steps), self._names
        )


def count_names(table: pa.Table) -> dict[str, dict[str, int]]:
    """Name → kind → how many rows."""
    import numpy as np

    names: dict[str, dict[str, int]] = {}
    for batch in table.select(["name", "kind"]).to_batches():
        name, kind = (batch.column(i).dictionary_encode() for i in (0, 1))
        called, kinds = name.dictionary.to_pylist(), kind.dictionary.to_pylist()
        first, second = (np.from_dlpack(each.indices).astype(np.int64) for each in (name, kind))
        both = first * len(kinds) + second
        pairs, counts = np.unique(both, return_counts=True)
        for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
            of_name = names.setdefault(called[pair // len(kinds)], {})
            which = kinds[pair % len(kinds)]
            of_name[which] = of_name.get(which, 0) + count
    return names


def seal(tail: Path, part: Path, number: int, *, durable: bool) -> None:
    """Make a Parquet file of an open end: in C++ from file to file, not in Python."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draft = part.with_name(part.name + ".part")
    count = _Count()
    with (
        pa.memory_map(str(tail)) as source,
        pa.ipc.open_stream(source) as batches,
        pq.ParquetWriter(draft, schema(), compression="zstd") as writer,
    ):
        # small groups, one after the other: little memory now, and a reader that wants one step
        # decodes only the one that has it
        for group in _groups(batches):
            count.add(group)
            writer.write_table(group)
        writer.add_key_value_metadata(metadata(number, count.contents()))
    if durable:
        fd = os.open(draft, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    draft.rename(part)
    if durable:
        sync_folder(part.parent)


def prepare_to_seal() -> None:
    """Import what sealing needs: at the beginning of a run, not in the middle of training."""
    import pyarrow.compute
    import pyarrow.parquet

    assert pyarrow.compute
    assert pyarrow.parquet


def _groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    import pyarrow as pa

    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum([each.num_rows for each in waiting]) >= GROUP:
            yield pa.Table.from_batches(waiting)
            waiting = []
    if waiting:
        yield pa.Table.from_batches(waiting)


def metadata(part: int, contents: Contents | None = None) -> dict[bytes, bytes]:
    """The metadata of a table: its format, which part it is or becomes, what is in it."""
    said: dict[str, Any] = {"format": VERSION, "part": part}
    if contents is not None:
        said["contents"] = msgspec.to_builtins(contents)
    return {_KEY: json.dumps(said).encode()}


def said_in(found: dict[bytes, bytes] | None) -> dict[str, Any]:
    """What the metadata of a table says."""
    try:
        said = json.loads((found or {})[_KEY])
    except (KeyError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}
