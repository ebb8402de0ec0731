"""`tap.open`: a live session elsewhere, with the verbs of the one here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tensortap.api import tables, verbs
from tensortap.api.run import Run
from tensortap.readers.live import open_live
from tensortap.readers.mirror import is_url
from tensortap.record import Kind
from tensortap.server.questions import Overview


class View:
    """What another live session holds, asked for as it is needed."""

    def __init__(self, address: str | None, timeout: float = 5.0) -> None:
        self.reader = open_live(address, timeout)

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<the live session at {self.reader.address}>"

    def names(self) -> list[str]:
        """All names that are held."""
        return self.reader.names()

    def overview(self) -> Overview:
        """Clients, names with their latest capture, and all counts."""
        return self.reader.overview()

    def summary(self) -> None:
        """Print who sends, every name with its latest capture, and the recent captures."""
        from rich.console import Console

        Console().print(tables.summary(self.overview()))

    def get(
        self,
        name: str,
        index: int = 0,
        *,
        step: int | None = None,
        rank: int | str | None = None,
        kind: Kind | str | None = None,
    ) -> Any:
        """A captured value: the latest, or `index` before it, or that of a `step`."""
        return verbs.get(self.reader, name, index, step=step, rank=rank, kind=kind)

    def get_all(
        self, name: str, *, rank: int | None = None, kind: Kind | str | None = None
    ) -> list[Any]:
        """All values that are held under a name, oldest to newest."""
        return verbs.get_all(self.reader, name, rank=rank, kind=kind)

    def describe(
        self,
        name: str,
        index: int = 0,
        *,
        step: int | None = None,
        rank: int | None = None,
        kind: Kind | str | None = None,
    ) -> None:
        """Print what is held under a name, and the latest in a line a tensor."""
        verbs.describe(self.reader, name, index, step=step, rank=rank, kind=kind)

    def close(self) -> None:
        """Hang up."""
        self.reader.close()


def open(where: str | Path | None = None, timeout: float = 5.0) -> Any:  # noqa: A001  the verb
    """A run by its folder or URL, or the live session at ``host:port`` (None: of this machine)."""
    if where is None or (isinstance(where, str) and not _is_path(where) and not is_url(where)):
        return View(where, timeout)
    return Run(where)


def _is_path(text: str) -> bool:
    return os.sep in text or os.path.exists(text) or text in (".", "..")
