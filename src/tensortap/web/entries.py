"""What the page shows: a run on disk, or a live session; opened when it is first asked for.

Both have a `version` that goes up when something new has come: figures and answers are remembered
by it, here and in the browser.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from tensortap.errors import TensortapError
from tensortap.history import History
from tensortap.readers.live import LiveReader, open_live
from tensortap.readers.reader import Reader
from tensortap.readers.run import RunReader
from tensortap.runs import layout
from tensortap.server import answers
from tensortap.server.server import Server
from tensortap.table.table import Table, table_of
from tensortap.web.whole_tensors import HeldLive, HeldRun, Steps


class Shown(Protocol):
    """Something that can be looked at."""

    id: str
    title: str
    what: str  # "run" or "live"
    version: int

    @property
    def where(self) -> str:
        """How Python opens it: the argument of `tap.open`."""
        ...

    @property
    def state(self) -> str:
        """In a word or two: open, ended, cut off, gone, live."""
        ...

    @property
    def gone(self) -> bool:
        """Whether its files are not there any more."""
        ...

    def reader(self) -> Reader:
        """Opened, if it was not."""
        ...

    def table(self) -> Table:
        """Its statistics as columns."""
        ...

    def held(self) -> Steps:
        """Which tensors were kept whole: name and kind → steps."""
        ...

    def look(self) -> bool:
        """Take in what is new; whether anything was."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


_AGAIN = 5.0  # seconds until a live session that has gone is looked for again
Signature = tuple[tuple[str, int, int], ...]


class ShownRun:
    """A run on disk, followed while it is written."""

    what = "run"

    def __init__(self, id: str, path: Path) -> None:  # noqa: A002  what it is called in the page
        self.id = id
        self.title = path.name
        self.path = path
        self.version = 0
        self._reader: RunReader | None = None
        self._table: Table | None = None
        self._held: HeldRun | None = None
        self._signature: Signature = ()
        self._gone = False
        self._lock = threading.RLock()

    @property
    def where(self) -> str:
        return str(self.path)

    @property
    def state(self) -> str:
        if self._gone:
            return "gone"
        reader = self._reader
        if reader is None:
            try:
                ended = layout.read_info(self.path).ended is not None
            except TensortapError:
                return "unreadable"
            return "ended" if ended else "open"
        if reader.info.ended:
            return "ended"
        return "cut off" if reader.truncated and not self._fresh() else "open"

    @property
    def gone(self) -> bool:
        return self._gone or not (self.path / layout.RUN_FILE).is_file()

    def _fresh(self) -> bool:
        """Whether it was written to in the last minute: then the end is torn only for a moment."""
        newest = max((mtime for _, _, mtime in self._signature), default=0)
        return time.time() - newest / 1e9 < 60

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

    def held(self) -> Steps:
        with self._lock:
            table = self.table()
            if self._held is None or self._held.table is not table:
                self._held = HeldRun(table)
            held = self._held
        return held.now()

    def look(self) -> bool:
        with self._lock:
            if self._reader is None:
                return False
            now = _signature(self.path)
            if now == self._signature:
                return False
            before, self._signature = self._signature, now
            was_gone, self._gone = self._gone, not (self.path / layout.RUN_FILE).is_file()
            if self._gone:
                self.version += not was_gone
                return not was_gone
            try:
                another = layout.read_info(self.path).id != self._reader.info.id
                if was_gone or another or _shrunk(before, now):
                    # another run took its place, or files of it went: nothing held is true, but
                    # it stays until there is something else (it may be about to be deleted)
                    reader = RunReader(self.path)
                    table = table_of(reader)
                    table.refresh()
                    self._reader, self._table = reader, table
                elif self._table is not None:
                    self._table.refresh()
                else:
                    self._reader.refresh()
            except (TensortapError, OSError):
                if (self.path / layout.RUN_FILE).is_file():
                    raise
                self._gone = True
            self.version += 1
            return True

    def close(self) -> None:
        with self._lock:
            self._reader = self._table = self._held = None


def _signature(path: Path) -> Signature:
    """What tells whether a run has changed, without opening any of it."""
    found = []
    places = [path / layout.RUN_FILE]
    try:
        for rank in sorted(os.scandir(path / "records"), key=lambda entry: entry.name):
            places += sorted(Path(rank.path).iterdir())
    except OSError:
        pass  # nothing has been written yet, or all is gone
    for place in places:
        try:
            stat = place.stat()
        except OSError:
            continue
        found.append((str(place), stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def _shrunk(before: Signature, now: Signature) -> bool:
    """Whether a sealed table went, or changed: they never do while a run is written."""
    held = {path: rest for path, *rest in now}
    sealed = [(path, rest) for path, *rest in before if path.endswith(".parquet")]
    tails = [(path, rest[0]) for path, *rest in before if path.endswith(layout.TAIL)]
    if any(held.get(path) != rest for path, rest in sealed):
        return True
    more = sum(path.endswith(".parquet") for path in held) > len(sealed)
    return not more and any(path not in held or held[path][0] < size for path, size in tails)


class ShownHere:
    """The live session of this process."""

    what = "live"
    gone = False  # it has no files

    def __init__(self, id: str, server: Server) -> None:  # noqa: A002
        self.id = id
        self.title = f"live {server.address}"
        self.server = server
        self.version = 1
        self._table: Table | None = None
        self._held = HeldLive(lambda cursor: answers.tensor_steps(server, cursor))
        self._lock = threading.Lock()

    @property
    def where(self) -> str:
        return str(self.server.address)

    @property
    def state(self) -> str:
        return "live" if self.server.alive else "closed"

    def reader(self) -> History:
        return self.server.history

    def table(self) -> Table:
        with self._lock:
            if self._table is None:
                self._table = table_of(self.server.history)
            return self._table

    def held(self) -> Steps:
        return self._held.now()

    def look(self) -> bool:
        changed = self.table().refresh()
        self.version += changed
        return changed

    def close(self) -> None:
        """The session goes on; what was made of it goes."""
        self._table = None


class ShownLive:
    """A live session in another process, or on another machine."""

    what = "live"
    gone = False  # it has no files

    def __init__(self, id: str, address: str) -> None:  # noqa: A002
        self.id = id
        self.title = f"live {address}"
        self.version = 1
        self._address = address
        self._reader: LiveReader | None = None
        self._table: Table | None = None
        self._gone = False
        self._again = 0.0  # when it is looked for again
        self._held = HeldLive(lambda cursor: self.reader().tensor_steps(cursor))
        self._lock = threading.RLock()

    @property
    def where(self) -> str:
        return self._address

    @property
    def state(self) -> str:
        return "gone" if self._gone else "live"

    def reader(self) -> LiveReader:
        with self._lock:
            if self._reader is None:
                self._reader = open_live(self._address, 3.0)
            return self._reader

    def table(self) -> Table:
        with self._lock:
            if self._table is None:
                self._table = table_of(self.reader())
            return self._table

    def held(self) -> Steps:
        return self._held.now()

    def look(self) -> bool:
        was_gone = self._gone
        if was_gone and time.monotonic() < self._again:
            return False
        self._again = time.monotonic() + _AGAIN
        try:
            if was_gone:
                # another session may have come to its address; until then the old one is shown
                self._table = table_of(self.reader())
            changed = self.table().refresh()
            self._gone = False
        except TensortapError:
            changed, self._gone = False, True
        changed = changed or self._gone != was_gone
        self.version += changed
        return changed

    def close(self) -> None:
        with self._lock:
            if self._reader is not None:
                self._reader.close()
            self._reader = self._table = None


def described(shown: Shown) -> dict[str, Any]:
    """What the list of runs says of it."""
    return {
        "id": shown.id,
        "title": shown.title,
        "what": shown.what,
        "where": shown.where,
        "state": shown.state,
        "version": shown.version,
    }
