"""The catalog of a page: the runs of folders, and any number of live sessions."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from tensortap.core.errors import NotFound
from tensortap.live.server import Server
from tensortap.page.catalog_entries import CatalogEntry, RunEntry, SessionEntry
from tensortap.runs import layout

_MAX_OPEN = 8  # entries that stay open


class Catalog:
    """The entries of the page, by id."""

    def __init__(self) -> None:
        self._folders: list[Path] = []
        self._entries: dict[str, CatalogEntry] = {}
        self._used: list[str] = []  # ids, the least recently used first
        self._lock = threading.RLock()

    def add(self, what: Any) -> str:
        """Add a run, a folder of runs, ``host:port``, or a server, reader or run object.

        Returns the id of the entry; for a folder that of its newest run, or "".
        """
        what = getattr(what, "server", what)  # of a session of this process
        if isinstance(what, Server):
            return self._add_entry(SessionEntry(str(what.address), what))
        reader = getattr(what, "reader", None)
        path = getattr(reader, "path", None) or getattr(what, "path", None)
        if path is not None:
            return self._add_path(Path(path))
        address = getattr(reader, "address", None) or getattr(what, "address", None)
        if address is not None:
            return self._add_entry(SessionEntry(str(address)))
        if not isinstance(what, (str, Path)):
            raise TypeError(
                f"run must be a run, a folder of runs or a live session, got {what!r:.80}"
            )
        if isinstance(what, Path) or Path(what).exists() or "/" in what:
            return self._add_path(Path(what))
        from tensortap.live.address import parse_address

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
            for path in _subfolders(folder)
            # a link out of the folder is not followed
            if str(path) not in known and path.resolve().parent == folder
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
        return [*sessions, *sorted(runs, key=lambda run: run.title, reverse=True)]

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

    def recently_used(self) -> list[CatalogEntry]:
        """Return the entries that stay open."""
        with self._lock:
            return [self._entries[each] for each in self._used]

    def close(self) -> None:
        """Close all entries."""
        for entry in self.entries():
            entry.close()


def _subfolders(folder: Path) -> list[Path]:
    """Return the runs in a folder."""
    try:
        return [path for path in sorted(folder.iterdir()) if (path / layout.RUN_FILE).is_file()]
    except OSError:
        return []  # not there for now; runs that were opened report it themselves
