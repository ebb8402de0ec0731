"""Entries of the page: a run on disk or a live session, opened when first needed.

An entry has a `version` that increases with new records. Server and browser cache responses by it.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.api.run_alerts import AlertFinder, alert_finders, run_alerts
from tensortap.core.errors import TensortapError
from tensortap.core.record import Kind
from tensortap.live import answers
from tensortap.live.questions import Overview, TensorStepsList
from tensortap.live.reader import open_live
from tensortap.live.server import Server
from tensortap.runs import layout
from tensortap.runs.arrow import numbers
from tensortap.runs.reader import Reader
from tensortap.runs.rows import NO_VALUE
from tensortap.runs.run_reader import RunReader
from tensortap.table.columns import has_tag
from tensortap.table.table import Table, table_of

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from tensortap.alerts import Alert

_RETRY_SECONDS = 5.0  # until a live session that has closed is looked for again
_IDLE_SECONDS = 60  # a tail that was written to more recently may be incomplete for a moment
Signature = tuple[tuple[str, int, int], ...]
StepsOfTensors = dict[tuple[str, str], set[int]]


class RunEntry:
    """A run on disk, followed while it is being written."""

    what = "run"

    def __init__(self, path: Path) -> None:
        self.id = self.title = path.name
        self.path = path
        self.where = str(path)
        self.version = 0
        self._reader: RunReader | None = None
        self._table: Table | None = None
        self._finders: list[AlertFinder] | None = None
        self._kept: _KeptTensors | None = None
        self._signature: Signature = ()
        self._deleted = False
        self._lock = threading.RLock()
        # held by what takes long the first time, so that figures do not wait for it
        self._slow = threading.Lock()

    @property
    def state(self) -> str:
        """One of: open, ended, truncated, unreadable, deleted."""
        if self._deleted:
            return "deleted"
        try:
            info = layout.read_info(self.path) if self._reader is None else self._reader.info
        except TensortapError:
            return "unreadable"
        if info.ended is not None:
            return "ended"
        newest = max((mtime for _, _, mtime in self._signature), default=0)
        is_idle = time.time() - newest / 1e9 > _IDLE_SECONDS
        truncated = self._reader is not None and self._reader.truncated
        return "truncated" if truncated and is_idle else "open"

    @property
    def deleted(self) -> bool:
        """Whether its files are no longer there."""
        return self._deleted or not self._exists()

    def _exists(self) -> bool:
        return (self.path / layout.RUN_FILE).is_file()

    def reader(self) -> RunReader:
        with self._lock:
            if self._reader is None:
                self._signature = _signature(self.path)
                self._reader = RunReader(self.path)
                self.version += 1
            return self._reader

    def table(self) -> Table:
        with self._lock:
            if self._table is None:
                self._table = table_of(self.reader())
            return self._table

    def alerts(self) -> list[Alert]:
        """Return the alerts that training raised, and those that rooms find, by step."""
        with self._slow:
            with self._lock:
                table, reader = self.table(), self.reader()
                if self._finders is None:
                    self._finders = alert_finders(table)
                finders = self._finders
            return run_alerts(table, reader, finders)

    def tensor_steps(self) -> StepsOfTensors:
        """Return which tensors were kept whole: name and kind → steps."""
        with self._slow:
            with self._lock:
                self._kept = kept = self._kept or _KeptTensors(self.table())
            return kept.steps()

    def refresh(self) -> bool:
        with self._lock:
            signature = _signature(self.path)
            if self._reader is None or signature == self._signature:
                return False
            self._signature = signature
            was_deleted, self._deleted = self._deleted, not self._exists()
            if self._deleted:
                self.version += not was_deleted
                return not was_deleted
            try:
                self._read_new(was_deleted)
            except (TensortapError, OSError):
                if self._exists():
                    raise
                self._deleted = True
            self.version += 1
            return True

    def _read_new(self, replaced: bool) -> None:
        assert self._reader is not None
        if replaced or layout.read_info(self.path).id != self._reader.info.id:
            # assigned only when complete: the run may be about to be deleted, and then what was
            # read of it stays visible
            reader = RunReader(self.path)
            self._table, self._reader = table_of(reader), reader
            self._finders = self._kept = None
        else:
            (self._table or self._reader).refresh()

    def close(self) -> None:
        with self._lock:
            self._reader = self._table = self._finders = self._kept = None


class _KeptTensors:
    """The steps at which tensors of a run were kept whole; reads a row only once."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._steps: StepsOfTensors = {}
        self._examined = 0  # rows

    def steps(self) -> StepsOfTensors:
        """Return name and kind → steps."""
        table = self._table
        with table.lock:
            chunks = table.read(["value", "payloads", "tags"], self._examined)
        for cells in chunks:  # without the lock: rows that have been reported do not change
            for row in (self._examined + _tensor_rows(table, self._examined, cells)).tolist():
                name, kind = table.names[table.name[row]], table.kinds[table.kind[row]]
                if kind != Kind.ALERT.value:
                    self._steps.setdefault((name, kind), set()).add(int(table.step[row]))
            self._examined += cells.num_rows
        return {key: set(steps) for key, steps in self._steps.items()}


def _tensor_rows(table: Table, start: int, cells: pa.Table) -> NDArray[np.intp]:
    """Return which of these rows hold a whole tensor, not only its statistics."""
    import pyarrow.compute as pc

    dtype = table.dtype[start : start + cells.num_rows]
    has_value = numbers(pc.binary_length(cells.column("value"))) > len(NO_VALUE)
    has_payload = numbers(pc.list_value_length(cells.column("payloads"))) > 0
    has_dtype = np.array([bool(dtype) for dtype in table.dtypes], np.bool_)[dtype]
    return np.flatnonzero((has_value & has_dtype) | has_payload | has_tag(cells, "file"))


def _signature(run: Path) -> Signature:
    """Return path, size and time of the files of a run, which tell whether it has changed."""
    paths = [run / layout.RUN_FILE]
    try:
        for rank in sorted(os.scandir(run / "records"), key=lambda folder: folder.name):
            paths += sorted(Path(rank.path).iterdir())
    except OSError:
        pass  # nothing has been written yet, or everything was deleted
    signature = []
    for path in paths:
        try:
            stat = path.stat()
        except OSError:
            continue
        signature.append((str(path), stat.st_size, stat.st_mtime_ns))
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
        was_closed = self._closed
        if was_closed and time.monotonic() < self._retry_at:
            return False
        self._retry_at = time.monotonic() + _RETRY_SECONDS
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
    return {key: getattr(entry, key) for key in keys}
