"""The catalog of a page: runs on disk and live sessions, opened when they are first needed.

An entry has a `version` that increases with new records. Browsers cache responses by it.
"""

from __future__ import annotations

import contextlib
import glob
import math
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.api.run_alerts import AlertFinder, alert_finders, run_alerts
from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.record import Kind, Summary
from tensortap.live import answers
from tensortap.live.address import Address, parse_address
from tensortap.live.answers import Overview, TensorStepsList
from tensortap.live.reader import open_live
from tensortap.live.server import Server
from tensortap.runs import layout
from tensortap.runs.reader import Reader
from tensortap.runs.rows import HEAD_COLUMNS, records_of
from tensortap.runs.run_reader import RunReader, is_url
from tensortap.runs.windows import Window
from tensortap.table.columns import HOLDERS, holds_tensor
from tensortap.table.frames import summarized
from tensortap.table.table import Table, table_of

if TYPE_CHECKING:
    from tensortap.alerts import Alert

_MAX_OPEN = 8  # entries that stay open
_MAX_COMPUTED = 1 << 30  # bytes of caught tensors whose statistics are computed at once
Signature = tuple[tuple[str, int, int], ...]
StepsOfTensors = dict[tuple[str, str], set[int]]


class RunEntry:
    """A run on disk, followed while it is being written."""

    what = "run"

    def __init__(self, path: Path, remote: RunReader | None = None) -> None:
        """`remote` reads a run on object storage, of which `path` has the files that are needed."""
        self.where = str(path) if remote is None else remote.where
        self.id = self.where.rstrip("/").rpartition("/")[2]
        self.path = path
        self._remote = remote
        self.version = 0
        self._signature: Signature = ()
        self._shown_state = ""
        self._lock = threading.RLock()
        # held by what takes long the first time, so that figures do not wait for it
        self._slow = threading.Lock()
        self.close()

    def close(self) -> None:
        """Forget what was read."""
        with self._lock:
            self._reader: RunReader | None = None
            self._table: Table | None = None
            self._finders: list[AlertFinder] | None = None
            # generation of the table, and rows whose statistics were computed if there were none
            self._completed = 0, 0
            # whole tensors of the table, and how many of its rows were searched for them
            self._kept: tuple[Table, StepsOfTensors, int] | None = None

    @property
    def info(self) -> layout.RunInfo:
        """The content of run.json."""
        return layout.read_info(self.path) if self._reader is None else self._reader.info

    @property
    def title(self) -> str:
        return str(self.facts()["title"])

    @property
    def state(self) -> str:
        """One of: training, ended, crashed, silent, unreadable, deleted."""
        if self.deleted:
            return "deleted"
        try:
            return layout.run_state(self.info, self.last_written)
        except TensortapError:
            return "unreadable"

    def facts(self) -> dict[str, Any]:
        """Return what run.json tells: title, notes, config, start, and seconds until the end."""
        try:
            info, ended = self.info, self.last_written
            started = datetime.fromisoformat(info.started).timestamp()
            if info.ended is not None:
                ended = datetime.fromisoformat(info.ended).timestamp()
        except (TensortapError, ValueError):  # deleted or damaged
            return {"title": self.path.name}
        return {
            "title": info.name or self.path.name, "notes": info.notes, "config": info.config,
            "started": started, "seconds": max(0.0, ended - started), "crashed": info.crashed,
        }  # fmt: skip

    @property
    def last_written(self) -> float:
        """The time at which a file of the run was last written to."""
        signature = self._signature or signature_of(self.path)
        return max((mtime for _, _, mtime in signature), default=0) / 1e9

    @property
    def deleted(self) -> bool:
        """Return whether its files are gone; what was read before stays visible."""
        return not (self.path / layout.RUN_FILE).is_file()

    def reader(self) -> RunReader:
        with self._lock:
            if self._reader is None:
                self._signature = signature_of(self.path)
                self._reader = self._remote or RunReader(self.path)
                self._shown_state = self.state
                self.version += 1
            return self._reader

    def table(self) -> Table:
        with self._lock:
            if self._table is None:
                self._table = table_of(self.reader())
            return self._table

    def complete(self) -> None:
        """Compute the statistics of caught tensors, of which only values are recorded."""
        with self._slow:
            table, reader = self.table().index(), self.reader()
            with table.lock:
                generation, start = self._completed
                start = start if generation == table.generation else 0  # it started over
                self._completed = table.generation, len(table)
                values = [kind in (Kind.VALUE, Kind.LOCAL) for kind in table.kinds]
                tensors = np.array([bool(dtype) for dtype in table.dtypes], np.bool_)
                lacking = np.array(values, np.bool_)[table.kind[start:]]
                lacking &= tensors[table.dtype[start:]] & np.isnan(table.column("count")[start:])
                rows = start + np.flatnonzero(lacking)
                heads = records_of(table.take(rows, HEAD_COLUMNS))
            found: dict[int, Summary] = {}
            room = _MAX_COMPUTED
            for row, head in zip(rows.tolist(), heads, strict=True):
                room -= 8 * math.prod(head.shape)
                if room < 0:
                    break
                stats = summarized(reader.load(head)).stats
                if stats is not None:
                    found[row] = stats
            table.fill(np.array([*found], np.int64), [*found.values()])

    def peek(self) -> Table:
        """Return the table; of a run that is not open, one that is forgotten after use."""
        is_closed = self._reader is None and self._remote is None
        return table_of(RunReader(self.path)) if is_closed else self.table()

    def alerts(self) -> list[Alert]:
        """Return the alerts that training raised, and those that rooms find, by step."""
        with self._slow:
            with self._lock:
                table, reader = self.table(), self.reader()
                self._finders = finders = self._finders or alert_finders(table)
            return run_alerts(table, reader, finders)

    def tensor_steps(self) -> StepsOfTensors:
        """Return which tensors were kept whole: name and kind → steps. Reads a row only once."""
        with self._slow:
            windows, table = self.table().compacted() or ((), self.table())
            known, found, examined = self._kept or (None, {}, 0)
            if known is not table:
                found, examined = {}, 0
                for window in windows:
                    _note_kept(window, found)
            with table.lock:
                chunks = table.read(HOLDERS, examined)
            for cells in chunks:  # without the lock: rows that have been reported do not change
                dtype = table.dtype[examined : examined + cells.num_rows]
                has_dtype = np.array([bool(each) for each in table.dtypes], np.bool_)[dtype]
                rows = examined + np.flatnonzero(holds_tensor(cells, has_dtype))
                for row in rows.tolist():
                    name, kind = table.names[table.name[row]], table.kinds[table.kind[row]]
                    if kind != Kind.ALERT.value:
                        found.setdefault((name, kind), set()).add(int(table.step[row]))
                examined += cells.num_rows
            self._kept = table, found, examined
            return {key: set(steps) for key, steps in found.items()}

    def refresh(self) -> bool:
        """Read what is new; return whether anything is."""
        with self._lock:
            signature, state = signature_of(self.path), self.state
            # a process that was killed changes the state, and no file
            if self._reader is None or (signature, state) == (self._signature, self._shown_state):
                return False
            self._signature, self._shown_state = signature, state
            try:
                if not self.deleted:
                    if layout.read_info(self.path).id != self._reader.info.id:
                        self.close()  # another run has taken its place
                    else:
                        (self._table or self._reader).refresh()
            except (TensortapError, OSError):
                if not self.deleted:
                    raise
            self.version += 1
            return True


def _note_kept(window: Window, found: StepsOfTensors) -> None:
    """Note the tensors of a window that a rank kept whole."""
    for group in window.whole.groups():
        cells = window.whole.read(group, ["name", "kind", "step", "kept"])
        for row in cells.filter(cells.column("kept")).to_pylist():
            if row["kind"] != Kind.ALERT.value:
                found.setdefault((row["name"], row["kind"]), set()).add(row["step"])


def signature_of(run: Path) -> Signature:
    """Return path, size and time of the files of a run, which tell whether it has changed."""
    signature = []
    for path in (layout.RUN_FILE, *sorted(glob.iglob("records/*/*", root_dir=run))):
        with contextlib.suppress(OSError):  # it is being deleted
            stat = (run / path).stat()
            signature.append((path, stat.st_size, stat.st_mtime_ns))
    return tuple(signature)


class SessionEntry:
    """A live session: of this process (`server`), or at an address."""

    what = "live"

    def __init__(self, address: str, server: Server | None = None) -> None:
        self.id = self.where = address
        self.title = f"live {address}"
        self.server = server
        self.version = 1
        self._reader: Any = None
        self._table: Table | None = None
        self._closed = False
        self._retry_at = 0.0
        self._steps: StepsOfTensors = {}
        self._cursor = 0
        self._valid_for: tuple[float, int] | None = None  # start of the session, evicted records
        self._steps_lock = threading.Lock()
        self._lock = threading.RLock()

    @property
    def state(self) -> str:
        alive = self.server is None or self.server.alive
        return "live" if alive and not self._closed else "closed"

    def reader(self) -> Reader:
        with self._lock:
            if self._reader is None:
                self._reader = self.server.history if self.server else open_live(self.where, 3.0)
            reader: Reader = self._reader
            return reader

    def overview(self) -> Overview:
        """Return the clients, names and counts of the session."""
        if self.server is not None:
            return answers.overview(self.server)
        overview: Overview = self.reader().overview()  # type: ignore[attr-defined]
        return overview

    def _new_tensor_steps(self, cursor: int) -> TensorStepsList:
        if self.server is not None:
            return answers.tensor_steps(self.server, cursor)
        steps: TensorStepsList = self.reader().tensor_steps(cursor)  # type: ignore[attr-defined]
        return steps

    def table(self) -> Table:
        with self._lock:
            if self._table is None:
                self._table = table_of(self.reader())
            return self._table

    def alerts(self) -> list[Alert]:
        """Return the alerts of training and of the session, which compares ranks by itself."""
        return self.table().alerts()

    def tensor_steps(self) -> StepsOfTensors:
        """Return which tensors the session holds: name and kind → steps.

        The session reports new ones; after evictions it is asked for all of them.
        """
        with self._steps_lock:
            answer = self._new_tensor_steps(self._cursor)
            if (answer.started, answer.evicted) != self._valid_for:
                self._steps = {}
                answer = self._new_tensor_steps(0) if self._cursor else answer
                self._valid_for = answer.started, answer.evicted
            self._cursor = answer.cursor
            for row in answer.rows:
                self._steps.setdefault((row.name, row.kind), set()).update(row.steps)
            return {key: set(steps) for key, steps in self._steps.items()}

    def refresh(self) -> bool:
        """Read what is new; return whether anything is."""
        was_closed = self._closed
        if was_closed and time.monotonic() < self._retry_at:
            return False
        self._retry_at = time.monotonic() + 5.0
        try:
            if was_closed:  # another session may listen there; until then the old one is shown
                self._table = table_of(self.reader())
            changed = self.table().refresh()
            self._closed = False
        except TensortapError:
            changed, self._closed = False, True
        changed |= self._closed != was_closed
        self.version += changed
        return changed

    def close(self) -> None:
        with self._lock:
            if self._reader is not None and self.server is None:
                self._reader.close()
            self._reader = self._table = None


CatalogEntry = RunEntry | SessionEntry


def describe_entry(entry: CatalogEntry) -> dict[str, Any]:
    """Return what the list of runs shows of an entry."""
    keys = ("id", "title", "what", "where", "state", "version")
    facts = entry.facts() if isinstance(entry, RunEntry) else {}
    return {key: getattr(entry, key) for key in keys} | facts


class Catalog:
    """The entries of the page, by id."""

    def __init__(self) -> None:
        self._folders: list[Path] = []
        self._entries: dict[str, CatalogEntry] = {}
        self._used: list[str] = []  # ids, the least recently used first
        self._lock = threading.RLock()

    def add(self, what: Any) -> str:
        """Add a run, its URL, a folder of runs, ``host:port``, or a server, reader or run object.

        Returns the id of the entry; for a folder that of its newest run, or "".
        """
        what = getattr(what, "server", what)  # of a session of this process
        if isinstance(what, Server):
            return self._add_entry(SessionEntry(str(what.address), what))
        what = getattr(what, "reader", what)
        what = getattr(what, "path", getattr(what, "address", what))
        if isinstance(what, Address):
            return self._add_entry(SessionEntry(str(what)))
        if not isinstance(what, (str, Path)):
            raise TypeError(
                f"run must be a run, a folder of runs or a live session, got {what!r:.80}"
            )
        if is_url(what):
            remote = RunReader(what)
            return self._add_entry(RunEntry(remote.path, remote))
        if isinstance(what, Path) or Path(what).exists() or "/" in what:
            return self._add_path(Path(what))
        if ":" not in what and "." not in what and what != "localhost":
            raise NotFound(f"no run or folder {what}; a live session is given as host:port")
        entry = SessionEntry(str(parse_address(what)))
        entry.reader()  # raises if no server is listening
        return self._add_entry(entry)

    def _add_path(self, path: Path) -> str:
        if not path.is_dir():
            raise NotFound(f"{path} is not a folder" if path.exists() else f"no folder {path}")
        path = path.resolve()
        if (path / layout.RUN_FILE).is_file():
            layout.read_info(path)  # raises if it cannot be read
            return self._add_entry(RunEntry(path))
        with self._lock:
            if path not in self._folders:
                self._folders.append(path)
        self.scan()
        runs = [entry for entry in self._entries.values() if isinstance(entry, RunEntry)]
        return max((run.id for run in runs if run.path.parent == path), default="")

    def _add_entry(self, entry: CatalogEntry) -> str:
        with self._lock:
            server = getattr(entry, "server", None)
            for known in self._entries.values():
                if known.where == entry.where and getattr(known, "server", None) is server:
                    return known.id
            base, number = entry.id, 1
            while entry.id in self._entries:
                number += 1
                entry.id = f"{base}~{number}"
            self._entries[entry.id] = entry
            return entry.id

    def scan(self) -> bool:
        """Add new runs of the folders; return whether there were any."""
        known = {entry.where for entry in list(self._entries.values())}
        new = [
            path
            for folder in list(self._folders)
            for file in sorted(glob.iglob(f"*/{layout.RUN_FILE}", root_dir=folder))
            # a link out of the folder is not followed
            if str(path := (folder / file).parent) not in known and path.resolve().parent == folder
        ]
        for path in new:
            self._add_entry(RunEntry(path))
        return bool(new)

    def entries(self) -> list[CatalogEntry]:
        """Return live sessions first, then runs, the newest first."""
        with self._lock:
            entries = list(self._entries.values())
        runs = [entry for entry in entries if entry.what == "run"]
        sessions = [entry for entry in entries if entry.what == "live"]
        return [*sessions, *sorted(runs, key=lambda run: run.id, reverse=True)]

    def get(self, id: str) -> CatalogEntry:  # noqa: A002
        """Return an entry; close the least recently used one if many are open."""
        with self._lock:
            entry = self._entries.get(id)
            if entry is None:
                raise NotFound(f"no run {id!r} is shown here")
            self._used = [each for each in self._used if each != id] + [id]
            idle, self._used = self._used[:-_MAX_OPEN], self._used[-_MAX_OPEN:]
            for each in idle:
                self._entries[each].close()
        return entry

    def peek(self, id: str) -> CatalogEntry | None:  # noqa: A002
        """Return an entry, or None, without opening it."""
        return self._entries.get(id)

    def recently_used(self) -> list[CatalogEntry]:
        """Return the entries that stay open."""
        with self._lock:
            return [self._entries[each] for each in self._used]

    def close(self) -> None:
        """Close all entries."""
        for entry in self.entries():
            entry.close()
