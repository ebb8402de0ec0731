"""The tables of one rank of a run: those that are sealed, and the open end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tensortap.errors import TensortapError
from tensortap.runs import format as layout

if TYPE_CHECKING:
    import pyarrow as pa

Unit = tuple[int, int]  # part and row group; (-1, 0) is the open end
TAIL: Unit = (-1, 0)


class Corrupt(TensortapError):
    """A table of a run that cannot be read."""


class Part(NamedTuple):
    """A sealed table: what is in it, and the range of steps of each of its row groups."""

    path: Path
    contents: layout.Contents
    footer: Any
    steps: list[tuple[int, int]]


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
            self.parts.append(_part(path))
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

    def units(
        self, name: str | None = None, step: int | None = None, after: int = -1
    ) -> list[Unit]:
        """What may hold a name, a step, or records after a number, oldest first."""
        found: list[Unit] = []
        for index, part in enumerate(self.parts):
            held = part.contents
            if (name is not None and name not in held.names) or held.last_seq <= after:
                continue
            found += [
                (index, group)
                for group, (low, high) in enumerate(part.steps)
                if step is None or low <= step <= high
            ]
        if self.tail:
            found.append(TAIL)
        return found

    def read(self, unit: Unit, columns: list[str] | None = None) -> pa.Table:
        """Some columns of a row group, or of the open end."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        index, group = unit
        if index < 0:
            table = pa.Table.from_batches(self.tail)
            return table if columns is None else table.select(columns)
        part = self.parts[index]
        try:
            with pq.ParquetFile(part.path, metadata=part.footer, memory_map=True) as file:
                return file.read_row_group(group, columns=columns, use_threads=False)
        except (pa.ArrowInvalid, OSError) as error:
            raise Corrupt(f"{part.path} cannot be read: {error}") from None

    def read_all(self, columns: list[str] | None) -> list[pa.Table]:
        """All rows, some columns."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        tables = []
        for part in self.parts:
            try:
                with pq.ParquetFile(part.path, metadata=part.footer, memory_map=True) as file:
                    tables.append(file.read(columns=columns))
            except (pa.ArrowInvalid, OSError) as error:
                raise Corrupt(f"{part.path} cannot be read: {error}") from None
        if self.tail:
            tables.append(self.read(TAIL, columns))
        return tables

    def names(self) -> dict[str, dict[str, int]]:
        """Name → kind → how many records."""
        import pyarrow.compute as pc

        held: dict[str, dict[str, int]] = {}
        for part in self.parts:
            for name, kinds in part.contents.names.items():
                for kind, count in kinds.items():
                    _count(held, name, kind, count)
        if self.tail:
            found = self.read(TAIL, ["name", "kind", "missing"])
            here = found.filter(pc.invert(found.column("missing")))
            for name, kinds in layout.count_names(here).items():
                for kind, count in kinds.items():
                    _count(held, name, kind, count)
        return held


def _count(held: dict[str, dict[str, int]], name: str, kind: str, count: int) -> None:
    kinds = held.setdefault(name, {})
    kinds[kind] = kinds.get(kind, 0) + count


def _part(path: Path) -> Part:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        footer = pq.read_metadata(path)
        said = layout.said_in(footer.metadata)
        contents = msgspec.convert(said["contents"], layout.Contents)
        column = footer.schema.names.index("step")
        groups = [footer.row_group(i).column(column) for i in range(footer.num_row_groups)]
        known = [group.statistics for group in groups]
        steps = [(s.min, s.max) if s and s.has_min_max else _ANY for s in known]
    except (pa.ArrowInvalid, OSError) as error:
        raise Corrupt(f"{path} cannot be read: {error}") from None
    except (KeyError, ValueError, msgspec.ValidationError):
        raise Corrupt(f"{path} does not say what is in it: it is no table of a run") from None
    return Part(path, contents, footer, steps)


_ANY = (-(1 << 63), 1 << 63)
