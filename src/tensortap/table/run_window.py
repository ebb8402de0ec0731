"""The rows of some steps of a run, without the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tensortap.readers.run import RunReader
from tensortap.runs.arrow import row_indices
from tensortap.runs.rows import schema
from tensortap.runs.tables import Unit
from tensortap.table.sources import ALL_STATISTICS, RowBlock, false_rows

if TYPE_CHECKING:
    import pyarrow as pa

    from tensortap.table.sources import Integers


class RunWindow:
    """The row groups of a run that hold some steps; only their columns are ever in memory."""

    statistics = ALL_STATISTICS
    bounded = clipped = outdated = has_shards = False

    def __init__(self, reader: RunReader, units: Sequence[tuple[int, Unit]]) -> None:
        self.blocks: Sequence[RowBlock] = [_UnitBlock(reader, rank, unit) for rank, unit in units]

    def refresh(self) -> None:
        """Do nothing: a window is of a run that has ended."""


class _UnitBlock:
    """The rows of a row group, or of the tail, that hold a record; columns are read once."""

    is_parallel = False

    def __init__(self, reader: RunReader, rank: int, unit: Unit) -> None:
        self._tables, self._unit = reader.by_rank[rank], unit
        self._columns: dict[str, Any] = {}
        missing = self._tables.read(unit, ["missing"]).column("missing")
        self._kept = false_rows(missing)
        self._size = len(missing) if self._kept is None else len(self._kept)

    def __len__(self) -> int:
        return self._size

    def read(self, columns: list[str], start: int) -> pa.Table:
        return self._table(columns).slice(start)

    def take(self, rows: Integers, columns: list[str]) -> pa.Table:
        return self._table(columns).take(row_indices(rows))

    def _table(self, columns: list[str]) -> pa.Table:
        import pyarrow as pa

        new = [name for name in columns if name not in self._columns]
        if new:
            cells = self._tables.read(self._unit, new)
            if self._kept is not None:
                cells = cells.take(row_indices(self._kept))
            self._columns |= zip(new, cells.columns, strict=True)
        fields = [schema().field(name) for name in columns]
        return pa.table([self._columns[name] for name in columns], schema=pa.schema(fields))
