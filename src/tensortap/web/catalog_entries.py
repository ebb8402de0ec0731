"""What the page can show: a run on disk or a live session, opened when first needed.

An entry has a `version` that increases with new records. Server and browser cache responses by it.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from tensortap.errors import TensortapError
from tensortap.readers.live import open_live
from tensortap.readers.reader import Reader
from tensortap.readers.run import RunReader
from tensortap.runs import layout
from tensortap.server import answers
from tensortap.server.questions import Overview, TensorStepsList
from tensortap.server.server import Server
from tensortap.table.table import Table, table_of
from tensortap.web.tensor_steps import RunTensorSteps, SessionTensorSteps, StepsOfTensors

_RETRY_SECONDS = 5.0  # until a live session that has closed is looked for again
_IDLE_SECONDS = 60  # a tail that was written to more recently may be incomplete for a moment
Signature = tuple[tuple[str, int, int], ...]


class CatalogEntry(Protocol):
    """A run or a live session."""

    id: str
    title: str
    what: str  # "run" or "live"
    where: str  # the argument of `tap.open`
    version: int

    @property
    def state(self) -> str:
        """One of: open, ended, truncated, unreadable, deleted; live, closed."""
        ...

    def reader(self) -> Reader:
        """Return its reader, opened if necessary."""
        ...

    def table(self) -> Table:
        """Return its columns."""
        ...

    def tensor_steps(self) -> StepsOfTensors:
        """Return which tensors were kept whole: name and kind → steps."""
        ...

    def refresh(self) -> bool:
        """Read what is new; return whether anything changed."""
        ...

    def close(self) -> None:
        """Release what was opened."""
        ...


def describe_entry(entry: CatalogEntry) -> dict[str, Any]:
    """Return what the list of runs shows of an entry."""
    keys = ("id", "title", "what", "where", "state", "version")
    return {key: getattr(entry, key) for key in keys}


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
        self._tensor_steps: RunTensorSteps | None = None
        self._signature: Signature = ()
        self._deleted = False
        self._lock = threading.RLock()

    @property
    def state(self) -> str:
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

    def tensor_steps(self) -> StepsOfTensors:
        with self._lock:
            table = self.table()
            if self._tensor_steps is None or self._tensor_steps.table is not table:
                self._tensor_steps = RunTensorSteps(table)
            steps = self._tensor_steps
        return steps.current()

    def refresh(self) -> bool:
        with self._lock:
            signature = _signature(self.path)
            if self._reader is None or signature == self._signature:
                return False
            before, self._signature = self._signature, signature
            was_deleted, self._deleted = self._deleted, not self._exists()
            if self._deleted:
                self.version += not was_deleted
                return not was_deleted
            try:
                self._read_new(was_deleted or _was_replaced(before, signature))
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
            self._table = table_of(reader)
            self._reader = reader
        else:
            (self._table or self._reader).refresh()

    def close(self) -> None:
        with self._lock:
            self._reader = self._table = self._tensor_steps = None


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


def _was_replaced(before: Signature, now: Signature) -> bool:
    """Return whether a sealed part changed or a tail shrank, which does not happen to one run."""
    files = {path: rest for path, *rest in now}
    parts = [(path, rest) for path, *rest in before if path.endswith(".parquet")]
    tails = [(path, size) for path, size, _ in before if path.endswith(layout.TAIL)]
    if any(files.get(path) != rest for path, rest in parts):
        return True
    was_sealed = sum(path.endswith(".parquet") for path in files) > len(parts)
    return not was_sealed and any(files.get(path, [0])[0] < size for path, size in tails)


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
        self._tensor_steps = SessionTensorSteps(self._new_tensor_steps)
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

    def tensor_steps(self) -> StepsOfTensors:
        return self._tensor_steps.current()

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
