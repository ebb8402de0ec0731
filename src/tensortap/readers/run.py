"""The reader of a run on disk: finished, crashed, or still being written."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tensortap.pipeline.receipt import Receipt, read_receipt
from tensortap.readers.mirror import Mirror, is_url
from tensortap.record import Kind, Record, Value
from tensortap.runs import layout
from tensortap.runs.arrow import column, scalar
from tensortap.runs.payloads import CorruptFile, PayloadFiles
from tensortap.runs.rows import HEAD_COLUMNS, decode_value, records_of, schema
from tensortap.runs.tables import TAIL, RankTables, Unit
from tensortap.select import fits

if TYPE_CHECKING:
    import pyarrow as pa

_Index = tuple[list[Record], dict[int, list[Record]]]  # all records of a name; the same by step
_Cells = tuple[bytes | None, list[dict[str, str]] | None]
_CELLS = ["value", "payloads", "seq"]
_CACHED_CELLS = 16  # row groups
_SEARCHES_BEFORE_INDEX = 3  # a name that is searched more often gets an index
_INDEXED_RECORDS = 500_000  # in all indexes together
_BATCH = 100_000  # records of several names that are read together


class RunReader:
    """Reads the records of a run; `refresh` reads what was written since."""

    def __init__(self, where: Path | str) -> None:
        self.where = str(where)
        self._mirror = Mirror(str(where)) if is_url(where) else None
        self.path = Path(where) if self._mirror is None else self._mirror.folder
        self.by_rank: dict[int, RankTables] = {}
        self.lock = threading.RLock()  # hold it to read several things that must be consistent
        self._payloads = PayloadFiles(self.path, self._mirror.fetch if self._mirror else None)
        self._positions: dict[tuple[int, int], tuple[Unit, int]] = {}  # rank, seq → unit, row
        self._cell_cache: dict[tuple[int, Unit], pa.Table] = {}
        self._last_seq: dict[int, int] = {}  # rank → newest record that `new_records` returned
        self._index: dict[str, _Index] = {}
        self._searches: collections.Counter[str] = collections.Counter()
        self.refresh()

    def refresh(self) -> None:
        """Read what was written since the last refresh."""
        with self.lock:
            if self._mirror is not None:
                self._mirror.refresh()
            self.info = layout.read_info(self.path)
            for rank in layout.ranks_of(self.path):
                if rank not in self.by_rank:
                    self.by_rank[rank] = RankTables(self.path, rank)
            for tables in self.by_rank.values():
                before = (len(tables.parts), len(tables.tail))
                tables.refresh()
                if before != (len(tables.parts), len(tables.tail)):
                    self._index.clear()

    @property
    def ranks(self) -> list[int]:
        """The ranks that have written."""
        return sorted(self.by_rank)

    @property
    def truncated(self) -> dict[int, int]:
        """Rank → bytes at the end of its tail that are not a complete batch, if there are any."""
        return {rank: t.truncated for rank, t in self.by_rank.items() if t.truncated}

    def counts(self, kind: Kind | None = None) -> dict[str, int]:
        """Return how many records each name has, over all ranks."""
        counts: collections.Counter[str] = collections.Counter()
        for tables in self.by_rank.values():
            for (name, of_kind), count in tables.counts().items():
                if kind is None or kind.value == of_kind:
                    counts[name] += count
        return dict(counts)

    def names(self, kind: Kind | None = None) -> list[str]:
        return list(self.counts(kind))

    # -- records without their values ------------------------------------------------------

    def records(
        self,
        name: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        kind: Kind | None = None,
        last: int | None = None,
    ) -> list[Record]:
        with self.lock:
            if name not in self._index and (step is not None or last is not None):
                self._searches[name] += 1
                if self._searches[name] < _SEARCHES_BEFORE_INDEX:
                    return self._search(name, step, rank, kind, last)
            records, by_step = self._index.get(name) or self._add_index(name)
            if step is not None:
                records = by_step.get(step, [])
            return [record for record in records if fits(record, step, rank, kind)]

    def _add_index(self, name: str) -> _Index:
        """Remember all records of a name until something new is written."""
        records = self._search(name)
        by_step: dict[int, list[Record]] = {}
        for record in records:
            by_step.setdefault(record.step, []).append(record)
        indexed = sum(len(others) for others, _ in self._index.values())
        if indexed + len(records) > _INDEXED_RECORDS:
            self._index.clear()
        self._index[name] = records, by_step
        return self._index[name]

    def _search(
        self,
        name: str,
        step: int | None = None,
        rank: int | None = None,
        kind: Kind | None = None,
        last: int | None = None,
    ) -> list[Record]:
        """Read only the row groups that may hold what is wanted, from the newest back."""
        import pyarrow.compute as pc

        def matches(table: pa.Table) -> Any:
            mask = _compare(table, "name", name)
            if step is not None:
                mask = pc.and_(mask, _compare(table, "step", step))
            if kind is not None:
                mask = pc.and_(mask, _compare(table, "kind", kind.value))
            return mask

        found: list[Record] = []
        for tables in self.by_rank.values():
            if rank is not None and tables.rank != rank:
                continue
            enough = last
            if last is not None and kind is None:
                # of a name with several kinds the newest of each is wanted, however old it is
                kinds = [of for named, of in tables.counts() if named == name]
                enough = last if len(kinds) == 1 else None
            here: list[Record] = []
            for unit in reversed(tables.units(name, step)):
                here = self._read(tables, unit, matches) + here
                if enough is not None and len(here) >= enough:
                    break
            found += here
        return self._in_order(found)

    def by_name(self, names: Iterable[str]) -> Iterator[tuple[str, list[Record]]]:
        """Yield names with all their records; the tables are read once for many names.

        Names are read in batches whose records fit into memory, however large the run is.
        """
        counts, batch, size = self.counts(), list[str](), 0
        for name in names:
            batch.append(name)
            size += counts.get(name, 0)
            if size >= _BATCH:
                yield from self._read_names(batch).items()
                batch, size = [], 0
        if batch:
            yield from self._read_names(batch).items()

    def _read_names(self, names: list[str]) -> dict[str, list[Record]]:
        import pyarrow as pa
        import pyarrow.compute as pc

        found: dict[str, list[Record]] = {name: [] for name in names}
        wanted = column(names, pa.string())
        with self.lock:
            for tables, unit in self._units():
                for record in self._read(
                    tables, unit, lambda t: pc.is_in(t.column("name"), value_set=wanted)
                ):
                    found[record.name].append(record)
        return {name: self._in_order(records) for name, records in found.items()}

    def new_records(self) -> list[Record]:
        """Return the records that came since the last call, in the order of their capture."""
        found: list[Record] = []
        with self.lock:
            for rank, tables in self.by_rank.items():
                seen = self._last_seq.get(rank, -1)
                for unit in tables.units(after=seen):
                    found += self._read(
                        tables,
                        unit,
                        lambda t: _compare(t, "seq", seen, "greater"),  # noqa: B023
                    )
                self._last_seq[rank] = max((r.seq for r in found if r.rank == rank), default=seen)
        return sorted(found, key=_capture_order)

    def latest(self) -> list[tuple[Record, int]]:
        """Return the newest record of every name, kind and rank with the number of records."""
        import pyarrow as pa
        import pyarrow.compute as pc

        found: list[tuple[Record, int]] = []
        with self.lock:
            for tables in self.by_rank.values():
                newest: dict[tuple[str, str], tuple[int, Unit]] = {}
                for unit in tables.units():
                    keys = tables.read(unit, ["name", "kind", "seq", "missing"])
                    keys = keys.filter(pc.invert(keys.column("missing")))
                    groups = keys.group_by(["name", "kind"]).aggregate([("seq", "max")])
                    columns = [groups.column(c).to_pylist() for c in ("name", "kind", "seq_max")]
                    for name, kind, seq in zip(*columns, strict=True):
                        newest[name, kind] = max(newest.get((name, kind), (-1, unit)), (seq, unit))
                by_unit: dict[Unit, list[int]] = {}
                for seq, unit in newest.values():
                    by_unit.setdefault(unit, []).append(seq)
                counts = tables.counts()
                for unit, seqs in by_unit.items():
                    wanted = column(seqs, pa.int64())
                    records = self._read(
                        tables,
                        unit,
                        lambda t: pc.is_in(t.column("seq"), value_set=wanted),  # noqa: B023
                    )
                    found += [(r, counts[r.name, r.kind.value]) for r in records]
        order = {name: i for i, name in enumerate(self.names())}
        return sorted(found, key=lambda each: (order[each[0].name], each[0].seq, each[0].rank))

    def _units(self) -> Iterator[tuple[RankTables, Unit]]:
        for tables in self.by_rank.values():
            for unit in tables.units():
                yield tables, unit

    def _in_order(self, records: list[Record]) -> list[Record]:
        return sorted(records, key=_capture_order) if len(self.by_rank) > 1 else records

    def _read(
        self, tables: RankTables, unit: Unit, matches: Callable[[pa.Table], Any]
    ) -> list[Record]:
        """Return the records of the rows for which `matches` returns true."""
        import pyarrow.compute as pc

        keys = tables.read(unit, ["name", "kind", "step", "seq", "missing"])
        mask = pc.and_(matches(keys), pc.invert(keys.column("missing")))
        rows = pc.indices_nonzero(mask)
        if not len(rows):
            return []
        records = records_of(tables.read(unit, HEAD_COLUMNS).take(rows))
        if unit != TAIL:  # its rows move to other places when it is sealed
            for row, record in zip(rows.to_pylist(), records, strict=True):
                self._positions[tables.rank, record.seq] = (unit, row)
        return records

    # -- values ------------------------------------------------------------------------------

    def load(self, record: Record) -> Record:
        with self.lock:
            data, payloads = self._cells(record)
        return msgspec.structs.replace(record, value=self.value_of(data, payloads))

    def value_of(self, data: bytes | None, payloads: list[dict[str, str]] | None) -> Value:
        """Return the value that the cells ``value`` and ``payloads`` of a row describe."""
        with self.lock:
            views = [self._payloads.view(each["file"], each["key"]) for each in payloads or ()]
        return decode_value(data, views)

    def _cells(self, record: Record) -> _Cells:
        import pyarrow.compute as pc

        tables = self.by_rank[record.rank]
        position = self._positions.get((record.rank, record.seq))
        if position is not None:
            return _cells_of(self._cell_table(tables, position[0]), position[1])
        for unit in tables.units(record.name, record.step):
            table = self._cell_table(tables, unit)
            rows = pc.indices_nonzero(_compare(table, "seq", record.seq)).to_pylist()
            if rows:
                return _cells_of(table, rows[0])
        raise CorruptFile(f"{record.name!r} at step {record.step} is no longer in {self.path}")

    def _cell_table(self, tables: RankTables, unit: Unit) -> pa.Table:
        """Return the cells of a row group; the last few row groups stay in memory."""
        if unit == TAIL:
            return tables.read(unit, _CELLS)
        key = tables.rank, unit
        table = self._cell_cache.pop(key, None)
        if table is None:
            table = tables.read(unit, _CELLS)
        self._cell_cache[key] = table
        if len(self._cell_cache) > _CACHED_CELLS:
            del self._cell_cache[next(iter(self._cell_cache))]
        return table

    def file(self, name: str) -> Path:
        """Return the path of a file that `dump` wrote into the run."""
        path = self.path / Path(name).name
        if self._mirror is not None:
            self._mirror.fetch(path.name)
        return path

    # -- whole tables ------------------------------------------------------------------------

    def tables(self, columns: list[str]) -> Iterator[pa.Table]:
        """Yield all rows, including those of dropped records, one row group at a time."""
        for tables, unit in self._units():
            yield tables.read(unit, columns)

    def table(self, columns: list[str] | None = None) -> pa.Table:
        """Return all rows of all ranks, including those of dropped records."""
        return _joined(
            [
                tables.read_part(part, columns)
                for tables in self.by_rank.values()
                for part in range(len(tables.part_sizes()))
            ],
            columns,
        )

    def statistics(self, columns: list[str]) -> pa.Table:
        """Return the rows that have statistics, without reading the values of the others."""
        import pyarrow.compute as pc

        found = []
        for tables, unit in self._units():
            counts = tables.read(unit, ["count"]).column("count")
            if counts.null_count == 0:
                found.append(tables.read(unit, columns))
            elif counts.null_count < len(counts):
                found.append(tables.read(unit, columns).filter(pc.is_valid(counts)))
        return _joined(found, columns)

    def missing(self) -> list[tuple[str, int, int]]:
        """Return (name, step, rank) of the records that were dropped over budget."""
        columns = ["name", "step", "rank", "missing"]
        table = self.table(columns)
        rows = table.filter(table.column("missing"))
        return list(zip(*(rows.column(c).to_pylist() for c in columns[:3]), strict=True))

    def receipts(self) -> dict[int, Receipt]:
        """Return the receipt of each rank that has ended the run."""
        found = {
            rank: layout.read_json(layout.receipt_file(self.path, rank)) for rank in self.ranks
        }
        return {rank: read_receipt(data) for rank, data in found.items() if isinstance(data, dict)}


def _cells_of(table: pa.Table, row: int) -> _Cells:
    return table.column("value")[row].as_py(), table.column("payloads")[row].as_py()


def _capture_order(record: Record) -> tuple[int, int]:
    return record.time_ns, record.seq


def _compare(table: pa.Table, name: str, value: object, operator: str = "equal") -> Any:
    import pyarrow.compute as pc

    cells = table.column(name)
    return getattr(pc, operator)(cells, scalar(value, cells.type))


def _joined(tables: list[pa.Table], columns: list[str] | None) -> pa.Table:
    import pyarrow as pa

    if not tables:
        empty = schema().empty_table()
        return empty if columns is None else empty.select(columns)
    return pa.concat_tables(table.replace_schema_metadata(None) for table in tables)
