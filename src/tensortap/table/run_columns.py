"""The tables of a run by columns: only those that are asked for, and of the rows only the new ones.

A row has its place: rank, part and number in it. While a part is the open end its rows are read
from there, later from the sealed table, where they are the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from tensortap.readers.run import RunReader

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray


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
                for part, rows in enumerate(reader.part_sizes()[part:], part):  # noqa: B020
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
        with self.reader.lock:
            return self.reader.by_rank[rank].read_part(part, columns, encode_words=True)

    def pick(self, rank: int, part: int, rows: NDArray[np.int64], columns: list[str]) -> pa.Table:
        """Some rows of a part, in their order: only the row groups that hold them are read."""
        with self.reader.lock:
            return self.reader.by_rank[rank].take(part, rows, columns)
