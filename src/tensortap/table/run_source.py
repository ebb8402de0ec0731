"""The rows of a run on disk, column by column.

A row keeps its address (rank, part, number in the part) when the tail of a rank is sealed: the
sealed part holds the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tensortap.readers.run import RunReader
from tensortap.runs.arrow import numbers, row_indices
from tensortap.runs.rows import STATISTICS, schema
from tensortap.runs.tables import RankTables
from tensortap.table.sources import VALUE

if TYPE_CHECKING:
    import pyarrow as pa

    from tensortap.table.sources import Integers


class RowSegment(NamedTuple):
    """Adjacent rows of one part of one rank."""

    rank: int
    part: int
    start: int
    size: int
    kept: Integers | None  # the rows that hold a record; None: all of them

    def row_count(self) -> int:
        """Return how many rows hold a record."""
        return self.size if self.kept is None else len(self.kept)


class RunSource:
    """The rows of a run, finished or still being written."""

    bounded = False
    clipped = False

    def __init__(self, reader: RunReader) -> None:
        self.reader = reader
        self._segments: list[RowSegment] = []
        self._ends = np.zeros(1, np.int64)  # row numbers at which segments end
        self._next: dict[int, tuple[int, int]] = {}  # rank → part and row to read next
        self._started = False

    def statistics(self) -> list[str]:
        return [*STATISTICS, VALUE]

    def refresh(self) -> int:
        if self._started:
            self.reader.refresh()
        self._started = True
        with self.reader.lock:
            for rank, tables in self.reader.by_rank.items():
                self._segments += self._new_segments(rank, tables)
        self._ends = np.cumsum([0, *map(RowSegment.row_count, self._segments)])
        return int(self._ends[-1])

    def _new_segments(self, rank: int, tables: RankTables) -> Iterator[RowSegment]:
        first, start = self._next.get(rank, (0, 0))
        for part, size in enumerate(tables.part_sizes()[first:], first):
            is_sealed = part < len(tables.parts)
            if size > start:
                kept = None
                if not is_sealed or tables.parts[part].contents.missing:
                    dropped = tables.read_part(part, ["missing"]).column("missing")
                    kept = _false_rows(dropped.slice(start, size - start))
                yield RowSegment(rank, part, start, size - start, kept)
            start = 0 if is_sealed else size
            self._next[rank] = part + is_sealed, start

    def read(self, columns: list[str], start: int = 0) -> Iterator[pa.Table]:
        first = int(np.searchsorted(self._ends, start, side="right")) - 1
        skipped = start - int(self._ends[first])
        key, table = None, None
        for segment in self._segments[first:]:
            end = segment.start + segment.size
            if table is None or key != segment[:2] or table.num_rows < end:
                key, table = segment[:2], self._read_part(*segment[:2], columns)
            rows = table.slice(segment.start, segment.size)
            if segment.kept is not None:
                rows = rows.take(row_indices(segment.kept))
            yield rows.slice(skipped)
            skipped = 0

    def _read_part(self, rank: int, part: int, columns: list[str]) -> pa.Table:
        with self.reader.lock:
            return self.reader.by_rank[rank].read_part(part, columns, encode_words=True)

    def take(self, rows: Integers, columns: list[str]) -> pa.Table:
        import pyarrow as pa

        tables = [pa.Table.from_batches([], schema()).select(columns)]
        of_segment = np.searchsorted(self._ends, rows, side="right") - 1
        for number in np.unique(of_segment).tolist():
            segment = self._segments[number]
            within = rows[of_segment == number] - self._ends[number]
            if segment.kept is not None:
                within = segment.kept[within]
            with self.reader.lock:
                tables_of_rank = self.reader.by_rank[segment.rank]
                tables.append(tables_of_rank.take(segment.part, segment.start + within, columns))
        return pa.concat_tables(table.replace_schema_metadata(None) for table in tables)


def _false_rows(mask: pa.ChunkedArray) -> Integers | None:
    """Return the positions of the false values, or None if all are."""
    import pyarrow.compute as pc

    if not pc.any(mask).as_py():
        return None
    return numbers(pc.indices_nonzero(pc.invert(mask.combine_chunks())).cast("int64"))
