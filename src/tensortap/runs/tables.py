"""The tables of one rank: sealed Parquet parts and the tail, an Arrow stream that still grows.

All code that reads or writes these files is here. A row has a fixed position: rank, part, and
index within the part. While a part is the tail its rows come from the Arrow stream, afterwards
from the Parquet file, where they are the same rows in the same order.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from tensortap.core.files import (
    CorruptFile,
    check_regular,
    contained,
    file_mode,
    leads_to,
    open_regular,
    plain,
    restrict,
)
from tensortap.runs import layout
from tensortap.runs.arrow import coded, leaf_statistics, read_groups, row_indices
from tensortap.runs.payloads import sync_folder, write_all
from tensortap.runs.rows import (
    METADATA_KEY,
    check_columns,
    check_rows,
    schema,
    unreadable,
    validated,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

_LARGEST_TABLE = 64 << 20  # bytes of a sealed table in memory, and 50 times those of its file
ROW_GROUP = 8192  # rows: small, because a reader that wants one step decodes a whole group
Unit = tuple[int, int]
"""The unit of reading: the numbers of a part and of a row group in it."""
TAIL: Unit = (-1, 0)
NameCounts = dict[str, dict[str, int]]
"""Name → kind → number of records."""
_ANY_STEP = (-(1 << 63), 1 << 63)
_END = 1 << 16  # bytes at the end of a part in which its contents are looked for
_KEY = b"\x18%c%s\x18" % (len(METADATA_KEY), METADATA_KEY)
_WORDS = ("name", "kind", "dtype")  # columns with few distinct strings


class Contents(msgspec.Struct, frozen=True):
    """A summary of a sealed part in its metadata, so that it can be searched without reading."""

    rows: int
    missing: int
    first_seq: int
    last_seq: int
    first_step: int
    last_step: int
    names: NameCounts


class PartFile:
    """A sealed part; of its footer, only the contents are read before its rows are needed."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        try:
            check_regular(path)
            contents = _contents_at_end(path) or self._contents_in_footer
        except OSError as error:
            raise CorruptFile(f"{path} cannot be read: {plain(str(error))}") from None
        if contents is None:
            raise CorruptFile(f"{path} is not a table of a run: its metadata is missing")
        self.contents: Contents = contents

    @functools.cached_property
    def _contents_in_footer(self) -> Contents | None:
        return _read_metadata((self._read_footer.metadata or {}).get(METADATA_KEY, b"")).contents

    @functools.cached_property
    def _read_footer(self) -> Any:
        import pyarrow.parquet as pq

        try:
            footer = pq.read_metadata(self.path)
            check_columns(self.path, footer.schema.to_arrow_schema())
        except unreadable() as error:
            raise CorruptFile(f"{self.path} cannot be read: {plain(str(error))}") from None
        return footer

    @functools.cached_property
    def footer(self) -> Any:
        """The metadata of the file, after checking it."""
        footer, contents = self._read_footer, self.contents
        if contents != self._contents_in_footer:
            raise CorruptFile(f"{self.path} says two things about its contents")
        check_rows(self.path, footer, contents.rows)
        return footer

    @functools.cached_property
    def steps(self) -> list[tuple[int, int]]:
        """The range of steps in each row group."""
        groups = range(self.footer.num_row_groups)
        ranges = [leaf_statistics(self.footer, group, "step") for group in groups]
        return [(r.min, r.max) if r is not None else _ANY_STEP for r in ranges]


def metadata(part: int, contents: Contents | None = None) -> dict[bytes, bytes]:
    """Return the metadata of a table: its format, the number of its part, what is in it."""
    content: dict[str, Any] = {"format": layout.VERSION, "part": part}
    if contents is not None:
        content["contents"] = msgspec.to_builtins(contents)
    return {METADATA_KEY: json.dumps(content).encode()}


class _Metadata(msgspec.Struct, frozen=True):
    """The contents of a table, from its metadata."""

    part: int = 0
    contents: Contents | None = None


def _read_metadata(content: bytes) -> _Metadata:
    try:
        return msgspec.json.decode(content, type=_Metadata)
    except msgspec.MsgspecError:
        return _Metadata()


# -- writing ---------------------------------------------------------------------------------


def seal(tail: Path, part: Path, number: int, *, durable: bool) -> None:
    """Write the tail as a Parquet file; Arrow copies from file to file without Python loops."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draft = part.with_name(part.name + ".part")
    with (
        pa.ipc.open_stream(tail.read_bytes()) as batches,
        pq.ParquetWriter(draft, schema(), compression="zstd") as writer,
    ):
        restrict(draft)
        table = batches.read_all()
        table.validate(full=True)  # a damaged file must not end the training
        for start in range(0, table.num_rows, ROW_GROUP):
            writer.write_table(table.slice(start, ROW_GROUP))
        writer.add_key_value_metadata(metadata(number, _contents(table)))
    if durable:
        fd = os.open(draft, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    draft.rename(part)
    if durable:
        sync_folder(part.parent)


def _contents(table: pa.Table) -> Contents:
    import pyarrow.compute as pc

    captured = table.select(["name", "kind", "step", "seq"]).filter(
        pc.invert(table.column("missing"))
    )
    seqs, steps = (pc.min_max(captured.column(name)).as_py() for name in ("seq", "step"))
    return Contents(
        table.num_rows,
        table.num_rows - captured.num_rows,
        seqs["min"] or 0,
        seqs["max"] or 0,
        steps["min"] or 0,
        steps["max"] or 0,
        _count_names(captured),
    )


def _count_names(table: pa.Table) -> NameCounts:
    """Return how many rows each name and kind has, in order of first appearance."""
    counts: NameCounts = {}
    (name, names), (kind, kinds) = (coded(table.column(each)) for each in ("name", "kind"))
    # not `group_by`, which keeps no order
    pairs, sizes = np.unique(name.astype(np.int64) * len(kinds) + kind, return_counts=True)
    for pair, size in zip(pairs.tolist(), sizes.tolist(), strict=True):
        counts.setdefault(names[pair // len(kinds)], {})[kinds[pair % len(kinds)]] = size
    return counts


def add_counts(found: Iterable[NameCounts]) -> NameCounts:
    """Return how many rows each name and kind has in all of some tables."""
    counts: NameCounts = {}
    for names in found:
        for name, kinds in names.items():
            known = counts.setdefault(name, {})
            for kind, count in kinds.items():
                known[kind] = known.get(kind, 0) + count
    return counts


# -- reading ---------------------------------------------------------------------------------


class TailFile:
    """The open end of a table: an Arrow stream to which whole batches are appended."""

    def __init__(self, path: Path, schema: Any) -> None:
        draft = path.with_name(path.name + ".part")
        self._fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, file_mode())
        self.nbytes = 0
        self.append(schema)
        draft.rename(path)

    def is_at(self, path: Path) -> bool:
        """Return whether a path still leads to this file."""
        return leads_to(path, self._fd)

    def append(self, message: Any, *, durable: bool = False) -> None:
        """Append a message; if the disk is full, remove what was written of it and raise."""
        try:
            position = write_all(self._fd, message, self.nbytes)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.nbytes)
            raise
        if durable:
            os.fsync(self._fd)
        self.nbytes = position

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class Storage(Protocol):
    """Object storage with a run, of which files are downloaded when they are needed."""

    def sizes(self, folder: str) -> Mapping[str, int]:
        """Return the names and sizes of the files in a folder."""
        ...

    def fetch(self, name: str) -> None:
        """Download a file unless it is here and has not changed."""
        ...


class RankTables:
    """Read access to the tables that one rank has written."""

    def __init__(self, run: Path, rank: int, storage: Storage | None = None) -> None:
        self.rank = rank
        self._storage = storage
        self.truncated = 0  # bytes at the end of the tail that are not a complete batch
        self._names: list[str] = []  # of the files of parts
        self._opened: dict[int, PartFile] = {}
        self.tail: list[pa.RecordBatch] = []
        self._counts: tuple[int, NameCounts] | None = None
        self._run = run
        self._inner = str(layout.records_folder(Path(), rank))
        self._folder = contained(run, self._inner)
        self._tail_part = -1
        self._tail_offset = 0
        self._tail_seen: tuple[int, ...] = ()  # inode, size and time of the tail that was read

    def refresh(self, covered: int = 0) -> None:
        """Read what was written since the last refresh; `covered` parts are in windows."""
        self._counts = None
        self._read_tail()
        # after the tail, so that a tail that is sealed in the meantime is found as a part
        self._names = self._part_names()
        for index in range(covered, self.sealed):
            self.part(index)
        if self._tail_part < self.sealed:
            self.tail = []

    @property
    def sealed(self) -> int:
        """The number of parts."""
        return len(self._names)

    @property
    def parts(self) -> list[PartFile]:
        """All parts."""
        return [self.part(index) for index in range(self.sealed)]

    def part(self, index: int) -> PartFile:
        """Return a part; its footer is read once."""
        if index not in self._opened:
            self._opened[index] = PartFile(self._own(self._names[index]), self.rank)
        return self._opened[index]

    def _part_names(self) -> list[str]:
        try:
            names = self._storage.sizes(self._inner) if self._storage else os.listdir(self._folder)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if name.endswith(".parquet"))

    def _own(self, name: str) -> Path:
        """Return the path of a table; raise CorruptFile if a link leads out of the run."""
        if self._storage is not None:
            self._storage.fetch(f"{self._inner}/{name}")
        path = self._folder / name
        # of 10,000 parts, not all folders above each are followed
        return contained(self._run, f"{self._inner}/{name}") if path.is_symlink() else path

    def _is_tail_empty(self) -> bool:
        """Return whether object storage tells that there is no tail, or only its schema."""
        if self._storage is None:
            return False
        nbytes = self._storage.sizes(self._inner).get(layout.TAIL, 0)
        empty = schema().with_metadata(metadata(len(self._part_names()))).serialize()
        return nbytes in (0, empty.size)

    def _read_tail(self) -> None:
        import pyarrow as pa

        if self._is_tail_empty():
            self.tail, self._tail_part = [], -1
            return
        with contextlib.suppress(OSError):
            stat = os.lstat(self._folder / layout.TAIL)
            seen, self._tail_seen = self._tail_seen, (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if seen == self._tail_seen:
                return
        path = self._own(layout.TAIL)
        try:
            with open_regular(path) as stream:
                columns = pa.ipc.read_schema(pa.ipc.read_message(stream))
                check_columns(path, columns)
                part = _read_metadata((columns.metadata or {}).get(METADATA_KEY, b"")).part
                if part == self._tail_part:
                    stream.seek(self._tail_offset)
                else:
                    self.tail, self._tail_part, self._tail_offset = [], part, stream.tell()
                self._read_batches(stream, columns)
        except FileNotFoundError:
            self.tail, self._tail_part = [], -1
        except unreadable():  # even the schema is incomplete
            self.tail, self._tail_part = [], -1
            self.truncated = path.stat().st_size

    def _read_batches(self, stream: Any, columns: pa.Schema) -> None:
        import pyarrow as pa

        size = os.fstat(stream.fileno()).st_size
        while self._tail_offset < size:
            try:
                message = pa.ipc.read_message(stream)
                if _is_compressed(message):
                    break  # tensortap writes none, and a small one may fill the memory
                batch = pa.ipc.read_record_batch(message, columns)
                self.tail.append(validated(batch, self.rank))
            except unreadable():
                break
            self._tail_offset = stream.tell()
        self.truncated = max(0, size - self._tail_offset)

    def counts(self, start: int = 0) -> NameCounts:
        """Return how many records each name and kind has, in order of first appearance.

        Those before the part `start` are left out.
        """
        import pyarrow.compute as pc

        if self._counts is not None and self._counts[0] == start:
            return self._counts[1]
        parts = [self.part(index).contents.names for index in range(start, self.sealed)]
        if self.tail:
            rows = self.read(TAIL, ["name", "kind", "missing"])
            parts.append(_count_names(rows.filter(pc.invert(rows.column("missing")))))
        self._counts = start, add_counts(parts)
        return self._counts[1]

    def units(
        self, name: str | None = None, step: int | None = None, after: int = -1
    ) -> list[Unit]:
        """Return what may hold a name, a step, or records after a seq, oldest first."""
        units: list[Unit] = []
        for index, part in enumerate(self.parts):
            contents = part.contents
            if (name is not None and name not in contents.names) or contents.last_seq <= after:
                continue
            units += [
                (index, group)
                for group, (low, high) in enumerate(part.steps)
                if step is None or low <= step <= high
            ]
        return [*units, TAIL] if self.tail else units

    def read(self, unit: Unit, columns: list[str] | None = None) -> pa.Table:
        """Return some columns of a row group, or of the tail."""
        if unit == TAIL:
            return self._tail_table(columns)
        return _read_parquet(self.part(unit[0]), columns, group=unit[1])

    @property
    def count(self) -> int:
        """The number of parts; the tail, if it has rows, is the last."""
        return self.sealed + bool(self.tail)

    def size(self, part: int) -> int:
        """Return the number of rows of a part."""
        if part < self.sealed:
            return self.part(part).contents.rows
        return sum(batch.num_rows for batch in self.tail)

    def read_part(
        self, part: int, columns: list[str] | None = None, *, encode_words: bool = False
    ) -> pa.Table:
        """Return some columns of all rows of a part.

        With `encode_words`, names, kinds and dtypes may come dictionary-encoded.
        """
        if part >= self.sealed:
            table = self._tail_table(columns)
        else:
            words = [n for n in _WORDS if n in columns] if encode_words and columns else None
            table = _read_parquet(self.part(part), columns, words)
        return table.replace_schema_metadata(None)

    def take(self, part: int, rows: NDArray[np.int64], columns: list[str]) -> pa.Table:
        """Return ascending rows of a part; only the row groups that hold them are read."""
        import pyarrow as pa

        if part >= self.sealed:
            return self._tail_table(columns).take(row_indices(rows))
        footer = self.part(part).footer
        sizes = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        groups = np.searchsorted(starts, rows, side="right") - 1
        tables = [
            self.read((part, group), columns).take(row_indices(rows[groups == group] - start))
            for group, start in enumerate(starts.tolist())
            if (groups == group).any()
        ]
        return pa.concat_tables(table.replace_schema_metadata(None) for table in tables)

    def _tail_table(self, columns: list[str] | None) -> pa.Table:
        import pyarrow as pa

        table = pa.Table.from_batches(self.tail)
        return table if columns is None else table.select(columns)


def _read_parquet(
    part: PartFile,
    columns: list[str] | None,
    words: list[str] | None = None,
    group: int | None = None,
) -> pa.Table:
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(part.path, metadata=part.footer, read_dictionary=words) as file:
            groups = list(range(part.footer.num_row_groups)) if group is None else [group]
            limit = _LARGEST_TABLE + 50 * part.path.stat().st_size
            return validated(read_groups(file, groups, columns, limit), part.rank)
    except unreadable() as error:
        raise CorruptFile(f"{part.path} cannot be read: {plain(str(error))}") from None


def _contents_at_end(path: Path) -> Contents | None:
    """Return the contents of a part from the end of its file; None if they are not found there.

    To read all of a footer takes 0.5 ms, and a run may have 10,000 parts.
    """
    with open_regular(path) as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - _END))
        data = stream.read()
    at = data.rfind(_KEY)  # in Thrift: the key, then the length of the value, 7 bits per byte
    if at < 0 or not data.endswith(b"PAR1"):
        return None
    at += len(_KEY)
    size = shift = 0
    while data[at] > 127:
        size, shift, at = size | (data[at] & 127) << shift, shift + 7, at + 1
    size |= data[at] << shift
    return _read_metadata(data[at + 1 : at + 1 + size]).contents


def _is_compressed(message: pa.Message) -> bool:
    """Return whether the body of a record batch is compressed, as its flatbuffer says."""
    data = message.metadata.to_pybytes()

    def field(table: int, number: int) -> int:
        vtable = table - struct.unpack_from("<i", data, table)[0]
        (size,) = struct.unpack_from("<H", data, vtable)
        if 4 + 2 * number >= size:
            return 0
        (offset,) = struct.unpack_from("<H", data, vtable + 4 + 2 * number)
        return table + int(offset) if offset else 0

    header = field(struct.unpack_from("<I", data)[0], 2)
    batch = header + int(struct.unpack_from("<I", data, header)[0])
    return field(batch, 3) != 0
