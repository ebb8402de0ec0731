"""A run on disk, finished, crashed, or still being written."""

from __future__ import annotations

import collections
import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tensortap.readers.mirror import Mirror, is_url
from tensortap.record import Kind, Record, Value
from tensortap.runs import format as layout
from tensortap.runs.arrow import scalar
from tensortap.runs.payloads import TensorReader
from tensortap.runs.rank_tables import TAIL, Corrupt, RankReader, Unit
from tensortap.select import fits
from tensortap.wire import messages as wire

if TYPE_CHECKING:
    import pyarrow as pa

_OPEN_FILES = 64
_KEPT_TABLES = 16
_OFTEN = 3  # a name that is asked for so often gets an index
_INDEXED = 500_000  # records in all indices
_BATCH = 100_000  # records of several names that are read together


_STATISTICS = frozenset((*layout.STATISTICS, "first_bin", "bins"))
_HEAD = [name for name in layout.COLUMNS if name not in ("value", "payloads", "number", "missing")]
_CELLS = ["value", "payloads", "seq"]


class Mapped(NamedTuple):
    """A payload in a mapped file."""

    view: memoryview

    @property
    def nbytes(self) -> int:
        return self.view.nbytes


class RunReader:
    """Reads a run; `refresh` takes in what has been written since."""

    def __init__(self, where: Path | str) -> None:
        self._mirror = Mirror(str(where)) if is_url(where) else None
        if self._mirror is not None:
            self._mirror.refresh()
        self.path = path = self._mirror.folder if self._mirror is not None else Path(where)
        self.where = str(where)
        self.info = layout.read_info(path)
        self._ranks: dict[int, RankReader] = {}
        self._where: dict[tuple[int, int], tuple[Unit, int]] = {}
        self._files: dict[str, TensorReader] = {}
        self._seen: dict[int, int] = {}
        self._index: dict[str, tuple[list[Record], dict[int, list[Record]]]] = {}
        self._asked: collections.Counter[str] = collections.Counter()
        self._tables: dict[tuple[int, Unit], pa.Table] = {}
        self._lock = threading.RLock()
        self.refresh()

    @property
    def lock(self) -> threading.RLock:
        """Held by whoever looks at several things that must fit together."""
        return self._lock

    @property
    def by_rank(self) -> dict[int, RankReader]:
        """Rank → what it has written."""
        return self._ranks

    def refresh(self) -> None:
        """Take in what has been written since the last look."""
        with self._lock:
            if self._mirror is not None:
                self._mirror.refresh()
            self.info = layout.read_info(self.path)
            for rank in layout.ranks_of(self.path):
                if rank not in self._ranks:
                    self._ranks[rank] = RankReader(self.path, rank)
            for reader in self._ranks.values():
                before = (len(reader.parts), len(reader.tail))
                reader.refresh()
                if before != (len(reader.parts), len(reader.tail)):
                    self._index.clear()
                    # rows of the open end have moved into a sealed table
                    self._where = {k: v for k, v in self._where.items() if v[0] != TAIL}

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
            for name, kinds in reader.names().items():
                held[name] = held.get(name, 0) + sum(kinds.values())
        return held

    def names(self, kind: Kind | None = None) -> list[str]:
        if kind is None:
            return list(self.counts())
        held = [reader.names() for reader in self._ranks.values()]
        return list(dict.fromkeys(n for names in held for n, k in names.items() if kind.value in k))

    def records(
        self,
        name: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        kind: Kind | None = None,
        last: int | None = None,
    ) -> list[Record]:
        with self._lock:
            if name not in self._index and (step is not None or last is not None):
                # a single question: look only where the answer may be. Asked again, the name
                # gets an index
                self._asked[name] += 1
                if self._asked[name] < _OFTEN:
                    return self._search(name, step, rank, kind, last)
            records, by_step = self._indexed(name)
            if step is not None:
                records = by_step.get(step, [])
            return [record for record in records if fits(record, step, rank, kind)]

    def _indexed(self, name: str) -> tuple[list[Record], dict[int, list[Record]]]:
        """All records of a name, and the same by step; remembered until something new comes."""
        found = self._index.get(name)
        if found is None:
            records = self._search(name, None, None, None, None)
            by_step: dict[int, list[Record]] = {}
            for record in records:
                by_step.setdefault(record.step, []).append(record)
            held = sum(len(indexed) for indexed, _ in self._index.values())
            if held + len(records) > _INDEXED:
                self._index.clear()
            found = self._index[name] = (records, by_step)
        return found

    def _search(
        self,
        name: str,
        step: int | None,
        rank: int | None,
        kind: Kind | None,
        last: int | None,
    ) -> list[Record]:
        found: list[Record] = []

        def wanted(table: pa.Table) -> Any:
            import pyarrow.compute as pc

            mask = _equal(table, "name", name)
            if step is not None:
                mask = pc.and_(mask, _equal(table, "step", step))
            if kind is not None:
                mask = pc.and_(mask, _equal(table, "kind", kind.value))
            return mask

        for number, reader in self._ranks.items():
            if rank is not None and number != rank:
                continue
            # with several kinds the newest of each is wanted, wherever it lies
            enough = last
            if last is not None and kind is None and len(reader.names().get(name, ())) != 1:
                enough = None
            here: list[Record] = []
            for unit in reversed(reader.units(name, step)):
                here = self._heads(reader, unit, wanted) + here
                if enough is not None and len(here) >= enough:
                    break
            found += here
        if len(self._ranks) > 1:
            found.sort(key=lambda r: (r.time_ns, r.seq))
        return found

    def by_name(self, names: Iterable[str]) -> Iterator[tuple[str, list[Record]]]:
        """Names with all their records, as `records` gives them: of many, in a look at the tables.

        So many at a time that their records fit into memory, whatever the size of the run.
        """
        counts, batch, size = self.counts(), list[str](), 0
        for name in names:
            batch.append(name)
            size += counts.get(name, 0)
            if size >= _BATCH:
                yield from self._of_names(batch).items()
                batch, size = [], 0
        yield from self._of_names(batch).items()

    def _of_names(self, names: list[str]) -> dict[str, list[Record]]:
        import pyarrow as pa
        import pyarrow.compute as pc

        found: dict[str, list[Record]] = {name: [] for name in names}
        chosen = pa.array(names, pa.string())
        with self._lock:
            for reader in self._ranks.values() if names else ():
                for unit in reader.units():
                    for head in self._heads(
                        reader, unit, lambda t: pc.is_in(t.column("name"), value_set=chosen)
                    ):
                        found[head.name].append(head)
        if len(self._ranks) > 1:
            for records in found.values():
                records.sort(key=lambda r: (r.time_ns, r.seq))
        return found

    def fresh(self) -> list[Record]:
        """The records that came since this was last called, in the order of their capture."""
        found: list[Record] = []
        with self._lock:
            for rank, reader in self._ranks.items():
                seen = self._seen.get(rank, -1)
                for unit in reader.units(after=seen):
                    found += self._heads(reader, unit, lambda t: _newer(t, seen))  # noqa: B023
                self._seen[rank] = max((r.seq for r in found if r.rank == rank), default=seen)
        return sorted(found, key=lambda r: (r.time_ns, r.seq))

    def latest(self) -> list[tuple[Record, int]]:
        """The newest record of every name, kind and rank, and how many it has; by name."""
        import pyarrow as pa
        import pyarrow.compute as pc

        found: list[tuple[Record, int]] = []
        with self._lock:
            for reader in self._ranks.values():
                newest: dict[tuple[str, str], tuple[int, Unit]] = {}
                held: collections.Counter[tuple[str, str]] = collections.Counter()
                for unit in reader.units():
                    keys = reader.read(unit, ["name", "kind", "seq", "missing"])
                    keys = keys.filter(pc.invert(keys.column("missing")))
                    groups = keys.group_by(["name", "kind"]).aggregate(
                        [("seq", "max"), ("seq", "count")]
                    )
                    columns = ("name", "kind", "seq_max", "seq_count")
                    rows = zip(*(groups.column(c).to_pylist() for c in columns), strict=True)
                    for name, kind, last, count in rows:
                        held[name, kind] += count
                        newest[name, kind] = max(newest.get((name, kind), (-1, unit)), (last, unit))
                by_unit: dict[Unit, list[int]] = {}
                for seq, unit in newest.values():
                    by_unit.setdefault(unit, []).append(seq)
                for unit, numbers in by_unit.items():
                    chosen = pa.array(numbers)
                    heads = self._heads(
                        reader,
                        unit,
                        lambda t: pc.is_in(t.column("seq"), chosen),  # noqa: B023 - used at once
                    )
                    found += [(r, held[r.name, r.kind.value]) for r in heads]
        place = {name: i for i, name in enumerate(self.names())}
        return sorted(found, key=lambda each: (place[each[0].name], each[0].seq, each[0].rank))

    def _heads(
        self, reader: RankReader, unit: Unit, wanted: Callable[[pa.Table], Any]
    ) -> list[Record]:
        """The records of the rows of a table that are wanted, without their values."""
        import pyarrow.compute as pc

        keys = reader.read(unit, ["name", "kind", "step", "seq", "missing"])
        mask = pc.and_(wanted(keys), pc.invert(keys.column("missing")))
        rows = pc.indices_nonzero(mask)
        if not len(rows):
            return []
        heads = reader.read(unit, _HEAD).take(rows)
        if heads.column("count").null_count == heads.num_rows:
            heads = heads.drop_columns(list(_STATISTICS))
        columns = [heads.column(name).to_pylist() for name in heads.column_names]
        found = [
            layout.record_of(dict(zip(heads.column_names, fields, strict=True)))
            for fields in zip(*columns, strict=True)
        ]
        for row, record in zip(rows.to_pylist(), found, strict=True):
            self._where[reader.rank, record.seq] = (unit, row)
        return found

    def load(self, record: Record) -> Record:
        with self._lock:
            data, places = self._cells(record)
        return msgspec.structs.replace(record, value=self.value_of(data, places))

    def value_of(self, data: bytes | None, places: list[dict[str, str]] | None) -> Value:
        """The value that the cells of a row tell of."""
        value = layout.decode_value(data)
        if places:
            with self._lock:
                payloads = [self._payload(place) for place in places]
            value = wire.with_payloads(value, payloads)
        return value

    def _cells(self, record: Record) -> tuple[bytes | None, list[dict[str, str]] | None]:
        """What a row says about its value: the value itself, and the payloads it refers to."""
        import pyarrow.compute as pc

        reader = self._ranks[record.rank]
        unit, row = self._where.get((record.rank, record.seq), (TAIL, -1))
        if unit != TAIL:
            return _pair(self._table(reader, unit), row)
        for each in reader.units(record.name, record.step):
            table = self._table(reader, each)
            rows = pc.indices_nonzero(_equal(table, "seq", record.seq)).to_pylist()
            if rows:
                return _pair(table, rows[0])
        raise Corrupt(f"{record.name!r} at step {record.step} is no longer in {self.path}")

    def _table(self, reader: RankReader, unit: Unit) -> pa.Table:
        """What a row group says about values; the last few stay in memory."""
        if unit == TAIL:
            return reader.read(unit, _CELLS)
        key = (reader.rank, unit)
        table = self._tables.pop(key, None)
        if table is None:
            table = reader.read(unit, _CELLS)
        self._tables[key] = table
        if len(self._tables) > _KEPT_TABLES:
            del self._tables[next(iter(self._tables))]
        return table

    def _payload(self, place: dict[str, str]) -> Mapped:
        name = place["file"]
        file = self._files.get(name)
        if file is None:
            path = (self.path / "tensors" / name).resolve()
            if not path.is_relative_to((self.path / "tensors").resolve()):
                raise Corrupt(f"{self.path} refers to a payload outside of it: {name!r}")
            if self._mirror is not None:
                self._mirror.fetch(f"tensors/{name}")
            if len(self._files) >= _OPEN_FILES:
                self._files.pop(next(iter(self._files)))
            file = self._files[name] = TensorReader(path)
        return Mapped(file.view(place["key"]))

    def file(self, name: str) -> Path:
        """A file that was dumped into the run."""
        path = self.path / Path(name).name
        if self._mirror is not None:
            self._mirror.fetch(path.name)
        return path

    def table(self, columns: list[str] | None = None) -> pa.Table:
        """All rows of all ranks, missing ones included."""
        import pyarrow as pa

        tables = [table for reader in self._ranks.values() for table in reader.read_all(columns)]
        if not tables:
            empty = layout.schema().empty_table()
            return empty if columns is None else empty.select(columns)
        return pa.concat_tables(table.replace_schema_metadata(None) for table in tables)

    def tables(self, columns: list[str]) -> Iterator[pa.Table]:
        """All rows, missing ones included, as many at a time as lie together on disk."""
        for reader in self._ranks.values():
            for unit in reader.units():
                yield reader.read(unit, columns)

    def statistics(self, columns: list[str]) -> pa.Table:
        """The rows that have statistics; the values of the others are not even looked at."""
        import pyarrow as pa
        import pyarrow.compute as pc

        found = []
        for reader in self._ranks.values():
            for unit in reader.units():
                counts = reader.read(unit, ["count"]).column("count")
                if counts.null_count == 0:
                    found.append(reader.read(unit, columns))
                elif counts.null_count < len(counts):
                    found.append(reader.read(unit, columns).filter(pc.is_valid(counts)))
        if not found:
            return layout.schema().empty_table().select(columns)
        return pa.concat_tables(table.replace_schema_metadata(None) for table in found)

    def receipts(self) -> dict[int, dict[str, Any]]:
        """What the run has cost each rank that has ended it."""
        found = {rank: read_json(layout.receipt_file(self.path, rank)) for rank in self.ranks}
        return {rank: receipt for rank, receipt in found.items() if isinstance(receipt, dict)}

    def missing(self) -> list[tuple[str, int, int]]:
        """(name, step, rank) of what was dropped over budget."""
        columns = ["name", "step", "rank", "missing"]
        table = self.table(columns)
        gone = table.filter(table.column("missing"))
        return list(zip(*(gone.column(c).to_pylist() for c in columns[:3]), strict=True))


def _pair(table: pa.Table, row: int) -> tuple[bytes | None, list[dict[str, str]] | None]:
    return table.column(0)[row].as_py(), table.column(1)[row].as_py()


def _equal(table: pa.Table, column: str, value: object) -> Any:
    import pyarrow.compute as pc

    found = table.column(column)
    return pc.equal(found, scalar(value, found.type))


def _newer(table: pa.Table, seen: int) -> Any:
    import pyarrow.compute as pc

    found = table.column("seq")
    return pc.greater(found, scalar(seen, found.type))


def read_json(path: Path) -> Any:
    """A file of the run's provenance, or None."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return json.loads(path.read_text())
    return None
