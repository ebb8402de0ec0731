"""The newest records of a live session as the rows of a table."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from tensortap.core.history import History
from tensortap.core.record import Kind, Record
from tensortap.runs.arrow import row_indices
from tensortap.runs.rows import STATISTICS, number_of
from tensortap.table.sources import ALL_STATISTICS, RowBlock, arrow_table

if TYPE_CHECKING:
    import pyarrow as pa

    from tensortap.table.sources import Integers


class RecentRecords:
    """The newest records of some kinds that a live session has received, as columns.

    It takes them out of the history as they arrive. Once there are `most` of them, the older half
    is dropped, and the table starts over.
    """

    statistics = ALL_STATISTICS
    bounded = clipped = has_shards = False
    columns = (
        "name", "kind", "dtype", "step", "rank", "call", "seq", "time_ns", "shape",
        "shard_offsets", "shard_placements", "digest", "number", "tags", *STATISTICS,
    )  # fmt: skip

    def __init__(self, history: History, kinds: Collection[Kind], most: int) -> None:
        self._history, self._kinds, self._most = history, kinds, most
        self._cursor = 0
        self.blocks: Sequence[RowBlock] = []

    def open(self) -> RecentRecords:
        """Start over with the rows that there are now."""
        self.outdated = False
        return self

    def refresh(self) -> None:
        end = self._history.written
        while self._cursor < end:
            self._cursor, found = self._history.since(self._cursor, 1 << 15)
            records = [record for record in found if record.kind in self._kinds]
            if records:
                self._append(records)

    def _append(self, records: list[Record]) -> None:
        values = [number_of(record.value) for record in records]
        block = _TableBlock(arrow_table(list(self.columns), records, values))
        self.blocks = [*self.blocks, block]
        if sum(map(len, self.blocks)) > self._most:
            self.outdated = True
            while len(self.blocks) > 1 and sum(map(len, self.blocks)) > self._most // 2:
                self.blocks = self.blocks[1:]


class _TableBlock:
    """Rows of an Arrow table."""

    is_parallel = False

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def read(self, columns: list[str], start: int) -> pa.Table:
        return self._table.select(columns).slice(start)

    def take(self, rows: Integers, columns: list[str]) -> pa.Table:
        return self._table.select(columns).take(row_indices(rows))
