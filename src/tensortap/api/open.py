"""`tap.open`: a run on disk, or a live session in another process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, overload

from tensortap.api.run import Run
from tensortap.api.steered import Steered
from tensortap.core.arguments import checked
from tensortap.live.answers import Overview
from tensortap.live.reader import LiveReader, open_live
from tensortap.runs.run_reader import is_url


class RemoteSession(Steered):
    """A live session in another process; a context manager, or `close` it."""

    def __init__(self, address: str | None, timeout: float = 5.0) -> None:
        self.reader: LiveReader = open_live(address, timeout)

    def __enter__(self) -> RemoteSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<live session at {self.reader.address}>"

    def overview(self) -> Overview:
        """Return its clients, its names with their latest record, and all counts."""
        return self.reader.overview()

    def summary(self) -> None:
        """Print its clients, every name with its latest record, and the recent records."""
        from rich.console import Console

        from tensortap.api import tables

        Console().print(tables.summary(self.overview()))

    def ask(self, what: str, **arguments: Any) -> bytes:
        """Return the encoded answer to a question of a viewer."""
        return self.reader.query(what, **arguments)

    def close(self) -> None:
        """Close the connection; the session goes on."""
        self.reader.close()


@overload
def open(where: None = None, timeout: float = 5.0) -> RemoteSession: ...  # noqa: A001
@overload
def open(where: str | Path, timeout: float = 5.0) -> Run: ...  # noqa: A001


@checked
def open(where: str | Path | None = None, timeout: float = 5.0) -> Any:  # noqa: A001  the verb
    """Return a run by its folder or URL, or the live session at ``host:port``.

    Without an argument it is the session at ``TENSORTAP_SERVER``, or on this machine. Type checkers
    take text for the path of a run.
    """
    if where is None or (isinstance(where, str) and not _is_path(where) and not is_url(where)):
        return RemoteSession(where, timeout)
    return Run(where)


def _is_path(text: str) -> bool:
    return os.sep in text or os.path.exists(text) or text in (".", "..")
