"""A run on disk, finished, crashed, or still being written."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tensortap.arrays.dtypes import itemsize
from tensortap.errors import TensortapError
from tensortap.formats import run as layout
from tensortap.formats import wire
from tensortap.formats.tensors import TensorReader
from tensortap.record import Record

if TYPE_CHECKING:
    import pyarrow as pa

_HEAD = (
    "name", "kind", "step", "call", "seq", "rank", "world_size", "time_ns",
    "type", "dtype", "shape", "digest",
)  # fmt: skip
_OPEN_FILES = 64


class Corrupt(TensortapError):
    """A table of a run that cannot be read."""


class Part(NamedTuple):
    """A sealed table."""

    path: Path
    contents: layout.Contents


class Mapped(NamedTuple):
    """A payload in a mapped file."""

    view: memoryview

    @property
    def nbytes(self) -> int:
        return self.view.nbytes


class RankReader:
    """What one rank has written."""

    def __init__(self, run: Path, rank: int) -> None:
        self.rank = rank
        self.cut = 0  # bytes at the end that were no whole batch
        self._folder = layout.records_folder(run, rank)
        self.parts: list[Part] = []
        self._tail_part = -1
        self._tail_offset = 0
        self._tail_schema: Any = None
        self.tail: list[pa.RecordBatch] = []

    def refresh(self) -> None:
        """Take in what is new: sealed tables, and the rest of the open end."""
        self._read_tail()
        # after the tail: what was sealed meanwhile is found here
        for path in sorted(self._folder.glob("*.parquet"))[len(self.parts) :]:
            self.parts.append(Part(path, _contents(path)))
        if self._tail_part < len(self.parts):
            self.tail = []

    def _read_tail(self) -> None:
        import pyarrow as pa

        try:
            with (self._folder / layout.TAIL).open("rb") as stream:
                if self._tail_part >= 0 and self._tail_part == self._part_of(stream):
                    stream.seek(self._tail_offset)
                    self._read_batches(stream)
                    return
                stream.seek(0)
                self._tail_schema = pa.ipc.read_schema(pa.ipc.read_message(stream))
                said = layout.said_in(self._tail_schema.metadata)
                self._tail_part = said.get("part", 0)
                self._tail_offset = stream.tell()
                self.tail = []
                self._read_batches(stream)
        except FileNotFoundError:
            self.tail = []
        except (pa.ArrowInvalid, OSError, EOFError) as error:
            # the schema itself is cut: nothing of the open end can be read
            self.cut = os.path.getsize(self._folder / layout.TAIL)
            self.tail = []
            if not isinstance(error, (pa.ArrowInvalid, EOFError)):
                raise

    @staticmethod
    def _part_of(stream: Any) -> int:
        import pyarrow as pa

        schema = pa.ipc.read_schema(pa.ipc.read_message(stream))
        found = layout.said_in(schema.metadata).get("part", 0)
        return int(found)

    def _read_batches(self, stream: Any) -> None:
        import pyarrow as pa

        size = os.fstat(stream.fileno()).st_size
        while self._tail_offset < size:
            try:
                message = pa.ipc.read_message(stream)
                self.tail.append(pa.ipc.read_record_batch(message, self._tail_schema))
            except (pa.ArrowInvalid, EOFError, OSError, ValueError):
                break
            self._tail_offset = stream.tell()
        self.cut = max(0, size - self._tail_offset)

    def tables(self, name: str | None = None) -> Iterator[tuple[int, Any]]:
        """The tables that hold a name, oldest first: (index, a thing to read columns from)."""
        for index, part in enumerate(self.parts):
            if name is None or name in part.contents.names:
                yield index, part.path
        if self.tail:
            import pyarrow as pa

            yield -1, pa.Table.from_batches(self.tail)

    def read(self, table: Any, columns: list[str] | None) -> pa.Table:
        """Some columns of a table."""
        if not isinstance(table, Path):
            return table if columns is None else table.select(columns)
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return pq.read_table(table, columns=columns, memory_map=True)
        except (pa.ArrowInvalid, OSError) as error:
            raise Corrupt(f"{table} cannot be read: {error}") from None

    def names(self) -> dict[str, int]:
        """Name → how many records."""
        held: dict[str, int] = {}
        for part in self.parts:
            for name, count in part.contents.names.items():
                held[name] = held.get(name, 0) + count
        for batch in self.tail:
            names = batch.column("name").to_pylist()
            for name, gone in zip(names, batch.column("missing").to_pylist(), strict=True):
                if not gone:
                    held[name] = held.get(name, 0) + 1
        return held


def _contents(path: Path) -> layout.Contents:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        said = layout.said_in(pq.read_metadata(path).metadata)
    except (pa.ArrowInvalid, OSError) as error:
        raise Corrupt(f"{path} cannot be read: {error}") from None
    try:
        return msgspec.convert(said["contents"], layout.Contents)
    except (KeyError, msgspec.ValidationError):
        raise Corrupt(f"{path} does not say what is in it: it is no table of a run") from None


class RunReader:
    """Reads a run; `refresh` takes in what has been written since."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.info = layout.read_info(path)
        self._ranks: dict[int, RankReader] = {}
        self._where: dict[tuple[int, int], tuple[int, int]] = {}
        self._files: dict[str, TensorReader] = {}
        self._lock = threading.RLock()
        self.refresh()

    def refresh(self) -> None:
        """Take in what has been written since the last look."""
        with self._lock:
            self.info = layout.read_info(self.path)
            for rank in layout.ranks_of(self.path):
                if rank not in self._ranks:
                    self._ranks[rank] = RankReader(self.path, rank)
            for reader in self._ranks.values():
                reader.refresh()

    @property
    def ranks(self) -> list[int]:
        """The ranks that have written."""
        return sorted(self._ranks)

    @property
    def cut(self) -> dict[int, int]:
        """Rank → bytes at the end of its table that were no whole batch, where there are any."""
        return {rank: reader.cut for rank, reader in self._ranks.items() if reader.cut}

    def counts(self) -> dict[str, int]:
        """Name → how many records, over all ranks."""
        held: dict[str, int] = {}
        for reader in self._ranks.values():
            for name, count in reader.names().items():
                held[name] = held.get(name, 0) + count
        return held

    def names(self) -> list[str]:
        return list(self.counts())

    def records(self, name: str) -> list[Record]:
        import pyarrow.compute as pc

        found: list[Record] = []
        with self._lock:
            for rank, reader in self._ranks.items():
                for index, source in reader.tables(name):
                    names = reader.read(source, ["name", "missing"])
                    wanted = pc.and_(
                        pc.equal(names.column("name"), name), pc.invert(names.column("missing"))
                    )
                    rows = pc.indices_nonzero(wanted)
                    if not len(rows):
                        continue
                    heads = reader.read(source, list(_HEAD)).take(rows)
                    columns = [heads.column(column).to_pylist() for column in _HEAD]
                    for row, fields in zip(
                        rows.to_pylist(), zip(*columns, strict=True), strict=True
                    ):
                        record = _head(fields)
                        self._where[rank, record.seq] = (index, row)
                        found.append(record)
        if len(self._ranks) > 1:
            found.sort(key=lambda r: (r.time_ns, r.seq))
        return found

    def load(self, record: Record) -> Record:
        with self._lock:
            row = self._row(record)
        payloads = [self._payload(p) for p in row["payloads"] or ()]
        full = layout.record_of(row)
        tree = layout.decode_value(row["value"])
        value = wire.place(tree, payloads, itemsize)
        return msgspec.structs.replace(full, value=value)

    def _row(self, record: Record) -> dict[str, Any]:
        import pyarrow.compute as pc

        reader = self._ranks[record.rank]
        index, row = self._where.get((record.rank, record.seq), (None, -1))
        for number, source in reader.tables(record.name):
            if index is not None and number != index:
                continue
            table = reader.read(source, None)
            if index is None or number == -1:
                # the open end may have been sealed since: look the record up
                rows = pc.indices_nonzero(pc.equal(table.column("seq"), record.seq)).to_pylist()
                if not rows:
                    continue
                row = rows[0]
            found: dict[str, Any] = table.slice(row, 1).to_pylist()[0]
            return found
        if index is not None:
            self._where.pop((record.rank, record.seq), None)
            reader.refresh()
            return self._row(record)
        raise Corrupt(f"{record.name!r} at step {record.step} is no longer in {self.path}")

    def _payload(self, place: dict[str, str]) -> Mapped:
        name = place["file"]
        file = self._files.get(name)
        if file is None:
            path = (self.path / "tensors" / name).resolve()
            if not path.is_relative_to((self.path / "tensors").resolve()):
                raise Corrupt(f"{self.path} refers to a payload outside of it: {name!r}")
            if len(self._files) >= _OPEN_FILES:
                self._files.pop(next(iter(self._files)))
            file = self._files[name] = TensorReader(path)
        return Mapped(file.view(place["key"]))

    def table(self, columns: list[str] | None = None) -> pa.Table:
        """All rows of all ranks, missing ones included."""
        import pyarrow as pa

        tables = [
            reader.read(source, columns)
            for reader in self._ranks.values()
            for _, source in reader.tables()
        ]
        if not tables:
            empty = layout.schema().empty_table()
            return empty if columns is None else empty.select(columns)
        return pa.concat_tables(table.replace_schema_metadata(None) for table in tables)

    def missing(self) -> list[tuple[str, int, int]]:
        """(name, step, rank) of what was dropped over budget."""
        columns = ["name", "step", "rank", "missing"]
        table = self.table(columns)
        gone = table.filter(table.column("missing"))
        return list(zip(*(gone.column(c).to_pylist() for c in columns[:3]), strict=True))


def _head(fields: tuple[Any, ...]) -> Record:
    from tensortap.record import Kind

    name, kind, step, call, seq, rank, size, time_ns, type_name, dtype, shape, digest = fields
    return Record(
        name, Kind(kind), step, call, seq, rank, size, time_ns, type_name or "", dtype or "",
        tuple(shape or ()), None, digest,
    )  # fmt: skip


def read_json(path: Path) -> Any:
    """A file of the run's provenance, or None."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return json.loads(path.read_text())
    return None
