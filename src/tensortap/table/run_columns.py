"""The tables of a run by columns: only those that are asked for, and of the rows only the new ones.

A row has its place: rank, part and number in it. While a part is the open end its rows are read
from there, later from the sealed table, where they are the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from tensortap.readers.run import RunReader
from tensortap.runs.arrow import places
from tensortap.runs.rank_tables import Corrupt, RankReader

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

_WORDS = ["name", "kind", "dtype"]


class Stretch(NamedTuple):
    """Rows of one rank that lie together in a part."""

    rank: int
    part: int
    start: int
    size: int


class RunColumns:
    """What a run holds, column by column; `fresh` says which rows have come."""

    def __init__(self, reader: RunReader) -> None:
        self.reader = reader
        self._at: dict[int, tuple[int, int]] = {}  # rank → part and row that come next

    def fresh(self) -> list[Stretch]:
        """The rows that came since this was last asked; the reader has been refreshed."""
        found: list[Stretch] = []
        with self.reader.lock:
            for rank, reader in self.reader.by_rank.items():
                part, row = self._at.get(rank, (0, 0))
                for part, rows in enumerate(_sizes(reader)[part:], part):  # noqa: B020
                    if rows > row:
                        found.append(Stretch(rank, part, row, rows - row))
                    row = rows
                    self._at[rank] = part, row
                    if part < len(reader.parts):
                        row = 0
                        self._at[rank] = part + 1, 0
        return found

    def read(self, stretches: Iterable[Stretch], columns: list[str]) -> Iterator[pa.Table]:
        """Some columns of stretches, one after the other."""
        held: tuple[tuple[int, int], pa.Table] | None = None
        for stretch in stretches:
            key = stretch.rank, stretch.part
            if held is None or held[0] != key:
                held = key, self._part(*key, columns)
            table = held[1]
            if table.num_rows < stretch.start + stretch.size:
                held = key, self._part(*key, columns)  # the open end has grown meanwhile
                table = held[1]
            yield table.slice(stretch.start, stretch.size)

    def _part(self, rank: int, part: int, columns: list[str]) -> pa.Table:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with self.reader.lock:
            reader = self.reader.by_rank[rank]
            if part >= len(reader.parts):
                return pa.Table.from_batches(reader.tail).select(columns)
            sealed = reader.parts[part]
        words = [name for name in _WORDS if name in columns]
        try:
            with pq.ParquetFile(
                sealed.path, metadata=sealed.footer, memory_map=True, read_dictionary=words
            ) as file:
                return file.read(columns=columns)
        except (pa.ArrowInvalid, OSError) as error:
            raise Corrupt(f"{sealed.path} cannot be read: {error}") from None

    def pick(self, rank: int, part: int, rows: NDArray[np.int64], columns: list[str]) -> pa.Table:
        """Some rows of a part, in their order: only the row groups that hold them are read."""
        import numpy as np
        import pyarrow as pa

        with self.reader.lock:
            reader = self.reader.by_rank[rank]
            if part >= len(reader.parts):
                return pa.Table.from_batches(reader.tail).select(columns).take(places(rows))
            footer = reader.parts[part].footer
            sizes = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
            starts = np.concatenate([[0], np.cumsum(sizes)])
            groups = np.searchsorted(starts, rows, side="right") - 1
            found = []
            for group in np.unique(groups).tolist():
                mine = rows[groups == group] - starts[group]
                found.append(reader.read((part, group), columns).take(places(mine)))
        return pa.concat_tables(table.replace_schema_metadata(None) for table in found)


def _sizes(reader: RankReader) -> list[int]:
    sizes = [part.contents.rows for part in reader.parts]
    if reader.tail:
        sizes.append(sum(batch.num_rows for batch in reader.tail))
    return sizes
