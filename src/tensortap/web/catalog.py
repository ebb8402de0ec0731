"""All that one page shows: the runs of folders, and any number of live sessions."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from tensortap.errors import NotFound, TensortapError
from tensortap.runs import layout
from tensortap.server.server import Server
from tensortap.web.entries import Shown, ShownHere, ShownLive, ShownRun

_OPEN = 8  # runs that stay open at a time


class Library:
    """What there is to look at, by the names that the page has for it."""

    def __init__(self) -> None:
        self._folders: list[Path] = []
        self._shown: dict[str, Shown] = {}
        self._used: list[str] = []  # the least recently used first
        self._lock = threading.RLock()

    def add(self, what: Any) -> str:
        """Show this too: a folder of runs, a run, ``host:port``, a server or reader of one.

        The id of what was added; of a folder that of its newest run, or an empty text.
        """
        if isinstance(what, Server):
            return self._keep(ShownHere(str(what.address), what))
        reader = getattr(what, "reader", None)
        path = getattr(reader, "path", None) or getattr(what, "path", None)
        if path is not None:  # a Run, a reader of one, or the run that this process writes
            return self._add_path(Path(path))
        address = getattr(reader, "address", None) or getattr(what, "address", None)
        if address is not None:
            return self._keep(ShownLive(str(address), str(address)))
        if isinstance(what, Path) or Path(what).exists() or "/" in what:
            return self._add_path(Path(what))
        from tensortap.wire.address import parse_address

        if ":" not in what and "." not in what and what != "localhost":
            raise NotFound(f"no run and no folder {what}; a live session is host:port")
        address = str(parse_address(what))
        live = ShownLive(address, address)
        live.reader()  # nobody there: said at once
        return self._keep(live)

    def _add_path(self, path: Path) -> str:
        if not path.is_dir():
            raise NotFound(f"no folder {path}" if not path.exists() else f"{path} is no folder")
        path = path.resolve()
        if (path / layout.RUN_FILE).is_file():
            layout.read_info(path)  # what cannot be read is said at once
            return self._keep(ShownRun(path.name, path))
        with self._lock:
            if path not in self._folders:
                self._folders.append(path)
        self.scan()
        runs = [shown for shown in self._shown.values() if isinstance(shown, ShownRun)]
        return max((run.id for run in runs if run.path.parent == path), default="")

    def _keep(self, shown: Shown) -> str:
        with self._lock:
            for held in self._shown.values():
                if held.where == shown.where and type(held) is type(shown):
                    return held.id
            base, number = shown.id, 1
            while shown.id in self._shown:
                number += 1
                shown.id = f"{base}~{number}"
            self._shown[shown.id] = shown
            return shown.id

    def scan(self) -> bool:
        """Look for runs that are new; whether there are."""
        found = False
        for folder in list(self._folders):
            try:
                entries = sorted(folder.iterdir())
            except OSError:
                continue  # gone for now: what was opened says so itself
            known = {shown.where for shown in list(self._shown.values())}
            for entry in entries:
                if str(entry) in known or not (entry / layout.RUN_FILE).is_file():
                    continue
                if entry.resolve().parent != folder:
                    continue  # a link to outside of the folder
                self._keep(ShownRun(entry.name, entry))
                found = True
        return found

    def all(self) -> list[Shown]:
        """Live sessions first, then runs, the newest first."""
        with self._lock:
            held = list(self._shown.values())
        live = [shown for shown in held if shown.what == "live"]
        runs = sorted((s for s in held if s.what == "run"), key=lambda s: s.title, reverse=True)
        return [*live, *runs]

    def get(self, id: str) -> Shown:  # noqa: A002  what it is called in the page
        """What has that id; whatever has not been looked at for long is let go."""
        with self._lock:
            shown = self._shown.get(id)
            if shown is None:
                raise NotFound(f"no run {id!r} is shown here")
            self._used = [each for each in self._used if each != id] + [id]
            idle, self._used = self._used[:-_OPEN], self._used[-_OPEN:]
            for each in idle:
                self._shown[each].close()
        return shown

    def in_use(self) -> list[Shown]:
        """Those that have been looked at lately."""
        with self._lock:
            return [self._shown[id] for id in self._used]  # noqa: A001

    def close(self) -> None:
        """Let go of everything."""
        for shown in self.all():
            shown.close()


def inside(path: Path, folder: Path) -> Path:
    """The path, where it lies in the folder, links followed; else it is refused."""
    real = path.resolve()
    if not real.is_relative_to(folder.resolve()):
        raise TensortapError(f"{path.name} points outside of {folder}: refused")
    return real
