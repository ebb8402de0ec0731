"""The reader of a run on disk: finished, crashed, or still being written."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tensortap.capture.ledger import Receipt
from tensortap.core.errors import MissingExtra, NotFound, TensortapError
from tensortap.core.files import CorruptFile, contained
from tensortap.core.record import Kind, Record, Value
from tensortap.core.rooms import offer
from tensortap.runs import layout, windows
from tensortap.runs.arrow import column, scalar
from tensortap.runs.payloads import PayloadFiles
from tensortap.runs.rows import HEAD_COLUMNS, decode_value, records_of, schema
from tensortap.runs.tables import TAIL, RankTables, Unit
from tensortap.runs.windows import Window, covering, read_windows

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds

_CELLS = ["seq", "value", "payloads"]
_CACHED = 64  # decoded row groups
_BATCH = 100_000  # records of several names that are read together


class RunReader:
    """Reads the records of a run; `refresh` reads what was written since."""

    def __init__(self, where: Path | str) -> None:
        self.where = str(where)
        self._mirror = _Mirror(str(where)) if is_url(where) else None
        self.path = Path(where).absolute() if self._mirror is None else self._mirror.folder
        self.by_rank: dict[int, RankTables] = {}
        self.lock = threading.RLock()  # hold it to read several things that must be consistent
        self._payloads = PayloadFiles(self.path, self._mirror.fetch if self._mirror else None)
        self._cache: dict[tuple[int, Unit, tuple[str, ...]], pa.Table] = {}
        self._window_names: list[str] = []
        self._windows: tuple[Window, ...] = ()
        self._last_seq: dict[int, int] = {}  # rank → newest record that `new_records` returned
        self.refresh()

    def refresh(self) -> None:
        """Read what was written since the last refresh."""
        with self.lock:
            if self._mirror is not None:
                self._mirror.refresh()
            self.info = layout.read_info(self.path)
            self.windows = self._read_windows()
            known = covering(self.windows)
            for rank in layout.ranks_of(self.path):
                if rank not in self.by_rank:
                    self.by_rank[rank] = RankTables(self.path, rank, self._mirror)
                self.by_rank[rank].refresh(known.covered.get(rank, 0) if known else 0)

    def _read_windows(self) -> tuple[Window, ...]:
        """Return the windows, which do not change once they are there."""
        try:
            names = os.listdir(self.path / windows.FOLDER)
        except (FileNotFoundError, NotADirectoryError):
            return ()
        if names != self._window_names:
            opened = self._mirror.opened if self._mirror is not None else self.path.joinpath
            self._window_names, self._windows = names, read_windows(self.path, names, opened)
        return self._windows

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
        counts: dict[str, int] = {}
        known = covering(self.windows)
        covered = known.covered if known else {}
        of_ranks = (t.counts(covered.get(rank, 0)) for rank, t in self.by_rank.items())
        for found in (known.names if known else {}, *of_ranks):
            for name, kinds in found.items():
                if kind is None or kind.value in kinds:
                    count = sum(kinds.values()) if kind is None else kinds[kind.value]
                    counts[name] = counts.get(name, 0) + count
        return counts

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
        """Read only the row groups that may hold what is wanted, from the newest back."""
        found: list[Record] = []
        with self.lock:
            for tables in self.by_rank.values():
                if rank is not None and tables.rank != rank:
                    continue
                enough = last
                if last is not None and kind is None:
                    # of a name with several kinds the newest of each is wanted, however old it is
                    enough = last if len(tables.counts().get(name, ())) == 1 else None
                here: list[Record] = []
                for unit in reversed(tables.units(name, step)):
                    here = self._read(tables, unit, lambda t: _matches(t, name, step, kind)) + here
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

        keys = self._columns(tables, unit, ["name", "kind", "step", "seq", "missing"])
        rows = pc.indices_nonzero(pc.and_(matches(keys), pc.invert(keys.column("missing"))))
        if not len(rows):
            return []
        return records_of(self._columns(tables, unit, HEAD_COLUMNS).take(rows))

    def _columns(self, tables: RankTables, unit: Unit, columns: list[str]) -> pa.Table:
        """Return columns of a row group, from the cache of those used last."""
        if unit == TAIL:
            return tables.read(unit, columns)
        key = tables.rank, unit, tuple(columns)
        table = self._cache.pop(key, None)
        if table is None:
            table = tables.read(unit, columns)
        self._cache[key] = table
        if len(self._cache) > _CACHED:
            del self._cache[next(iter(self._cache))]
        return table

    # -- values ------------------------------------------------------------------------------

    def load(self, record: Record) -> Record:
        with self.lock:
            tables = self.by_rank.get(record.rank) or RankTables(self.path, record.rank)
            for unit in tables.units(record.name, record.step):
                cells = self._columns(tables, unit, _CELLS)
                rows = cells.filter(_compare(cells, "seq", record.seq)).to_pylist()
                if rows:
                    value = self.value_of(rows[0]["value"], rows[0]["payloads"])
                    return msgspec.structs.replace(record, value=value)
        raise CorruptFile(f"{record.name!r} at step {record.step} is no longer in the run")

    def value_of(self, data: bytes | None, payloads: list[dict[str, str]] | None) -> Value:
        """Return the value that the cells ``value`` and ``payloads`` of a row describe."""
        with self.lock:
            views = [self._payloads.view(each["file"], each["key"]) for each in payloads or ()]
        return decode_value(data, views)

    def file(self, name: str) -> Path:
        """Return the path of a file that `dump` wrote into the run."""
        path = contained(self.path, Path(name).name)
        if self._mirror is not None:
            with self.lock:
                self._mirror.fetch(path.name)
        return path

    def load_file(self, name: str, *, trust: bool = False) -> Any:
        """Return the object in a file that `dump` wrote; that of a pickle only if it is trusted."""
        return offer("dump.load_file")(self.file(name), trust=trust)

    # -- whole tables ------------------------------------------------------------------------

    def table(self, columns: list[str] | None = None) -> pa.Table:
        """Return all rows of all ranks, including those of dropped records."""
        parts = [
            tables.read_part(part, columns)
            for tables in self.by_rank.values()
            for part in range(tables.count)
        ]
        return _joined(parts, columns)

    def dataset(self) -> ds.Dataset:
        """Return the records of all ranks as an Arrow dataset; dropped records are left out."""
        import pyarrow as pa
        import pyarrow.dataset as ds

        columns = schema().remove_metadata()
        with self.lock:
            parts = [str(part.path) for tables in self.by_rank.values() for part in tables.parts]
            tails = [batch for tables in self.by_rank.values() for batch in tables.tail]
        sealed = ds.dataset(parts, columns, "parquet")
        rows = pa.Table.from_batches([batch.select(columns.names) for batch in tails], columns)
        return ds.dataset([sealed, ds.dataset(rows)]).filter(~ds.field("missing"))

    def missing(self) -> list[tuple[str, int, int]]:
        """Return (name, step, rank) of the records that were dropped over budget."""
        columns = ["name", "step", "rank", "missing"]
        known = covering(self.windows)
        covered = known.covered if known and not known.missing else {}
        found = [
            tables.read_part(part, columns)
            for rank, tables in self.by_rank.items()
            for part in range(covered.get(rank, 0), tables.count)
            if part >= tables.sealed or tables.part(part).contents.missing
        ]
        if not found:
            return []
        table = _joined(found, columns)
        rows = table.filter(table.column("missing"))
        return list(zip(*(rows.column(c).to_pylist() for c in columns[:3]), strict=True))

    def receipts(self) -> dict[int, Receipt]:
        """Return the receipt of each rank that has ended the run."""
        files = {rank: layout.receipt_file(Path(), rank) for rank in self.ranks}
        found = {rank: layout.read_json(self.path, file) for rank, file in files.items()}
        return {
            rank: msgspec.convert(data, Receipt)
            for rank, data in found.items()
            if isinstance(data, dict)
        }


def is_url(where: object) -> bool:
    """Return whether this is the URL of a run.

    >>> is_url("s3://bucket/runs/a"), is_url("runs/a")
    (True, False)
    """
    return isinstance(where, str) and "://" in where


def open_remote(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    try:
        import fsspec
    except ImportError:
        raise MissingExtra.of(f"{url} needs fsspec", "s3") from None
    try:
        files, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise TensortapError(f"{url} cannot be opened: {error}") from None
    return files, root


class _Mirror:
    """A local copy of a run on object storage: of the files that are needed.

    All other code works on local files, which it can map into memory.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._files, self._root = open_remote(url)
        self.folder = Path(tempfile.mkdtemp(prefix="tensortap-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._listed: dict[str, Any] = {}  # what the storage tells about each file
        self._known: dict[str, Any] = {}  # the same when it was downloaded

    def refresh(self) -> None:
        """List the files, and download run.json and the manifests of windows."""
        try:
            self._files.invalidate_cache()
            found = self._files.find(self._root, detail=True)
        except FileNotFoundError:
            found = {}
        except Exception as error:
            raise TensortapError(f"{self._url} cannot be read: {error}") from None
        if not found:
            raise NotFound(f"no such run: {self._url}")
        self._listed = {
            os.path.relpath(path, self._root): (info.get("size"), info.get("ETag"),
                                                str(info.get("LastModified", info.get("mtime"))))
            for path, info in found.items()
        }  # fmt: skip
        for name in self._listed:
            if name == layout.RUN_FILE or name.endswith(f"/{windows.MANIFEST}"):
                self.fetch(name)
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the names and sizes of the files in a folder."""
        return {
            os.path.basename(name): size
            for name, (size, *_) in self._listed.items()
            if os.path.dirname(name) == folder
        }

    def opened(self, name: str) -> Any:
        """Return a file of a window: a roll-up is downloaded, of other files only what is read."""
        if not name.endswith(windows.WHOLE):
            return self._files.open(f"{self._root}/{name}", block_size=1 << 20)
        self.fetch(name)
        return self.folder / name

    def fetch(self, name: str) -> None:
        """Download a file unless it is here and has not changed."""
        listed = self._listed.get(name)
        if listed is not None and self._known.get(name) == listed:
            return
        target = contained(self.folder, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f"{target.name}.part")
        try:
            self._files.get_file(f"{self._root}/{name}", str(draft))
        except FileNotFoundError:
            raise NotFound(f"{self._url} has no {name}") from None
        draft.replace(target)
        self._known[name] = listed


def _capture_order(record: Record) -> tuple[int, int]:
    return record.time_ns, record.seq


def _matches(table: pa.Table, name: str, step: int | None, kind: Kind | None) -> Any:
    import pyarrow.compute as pc

    mask = _compare(table, "name", name)
    if step is not None:
        mask = pc.and_(mask, _compare(table, "step", step))
    if kind is not None:
        mask = pc.and_(mask, _compare(table, "kind", kind.value))
    return mask


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
