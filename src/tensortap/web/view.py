"""`tap.view`: the page, from Python."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tensortap.errors import MissingExtra, NotFound

_page: Any = None


def view(
    run: Any = None,
    *more: Any,
    host: str = "127.0.0.1",
    port: int | None = None,
    names: Iterable[str] = (),
    browser: bool = True,
) -> Any:
    """Open the page on runs and live sessions: ``tap.view("runs")``, ``tap.view(run)``.

    Any number of runs, folders of runs and live sessions (``"host:port"``, or what `tap.serve` and
    `tap.open` gave); without one it is what this process has: its live session, its open run.
    `names` are others that browsers reach this machine under, such as that of a proxy. Called
    again, it adds to the page that is there. Returns the page; `close` ends it.
    """
    global _page
    page_of, library_of = _server()
    fresh = _page is None or not _page.alive
    library = library_of() if fresh else _page.library
    ids = [library.add(each) for each in (_of_this_process() if run is None else [run, *more])]
    if fresh:
        _page = page_of(library, host, port, names)
        say(_page, port)
    else:
        sys.stdout.write(f"tensortap: the page is on {_page.url}\n")
    if browser:
        open_browser(_page, next(filter(None, ids), ""))
    return _page


def _server() -> tuple[Any, Any]:
    try:
        from tensortap.web.catalog import Library
        from tensortap.web.server import Page
    except ImportError as error:
        missing = error.name or "starlette"
        raise MissingExtra(f"the page needs {missing}: pip install 'tensortap[view]'") from None
    return Page, Library


def _of_this_process() -> list[Any]:
    """The live session and the run of this process, else the folder ``runs``."""
    from tensortap.api import session as live
    from tensortap.sources.init import opened

    found: list[Any] = []
    with contextlib.suppress(NotFound):  # a program that only writes has none
        found.append(live.current())
    run = opened()
    if run is not None:
        found.append(run)
    if not found and Path("runs").is_dir():
        found.append(Path("runs"))
    if not found:
        raise NotFound(
            "nothing to show: no live session (tap.serve) and no run (tap.init) in this process, "
            "and no folder 'runs' here; say which: tap.view('path/to/runs')"
        )
    return found


def say(page: Any, port: int | None = None) -> None:
    """Where the page is, and who can see it."""
    from tensortap.web.auth import is_loopback
    from tensortap.web.server import PORT

    lines = [f"the page is on {page.url}"]
    if port is None and page.port != PORT:
        lines.append(f"port {PORT} is in use; it took the next that was free, {page.port}")
    if not is_loopback(page.host):
        lines.append(
            "other machines can reach it: whoever has this address with its token can look, and "
            "the connection is not encrypted; an ssh tunnel to 127.0.0.1 is safer"
        )
    sys.stdout.write("".join(f"tensortap: {line}\n" for line in lines))
    sys.stdout.flush()


def open_browser(page: Any, shown: str = "") -> None:
    """Show the page in the user's browser, where there is one."""
    import webbrowser
    from urllib.parse import quote

    where = f"{page.url}#run={quote(shown)}" if shown else page.url
    try:
        opened = webbrowser.open(where)
    except webbrowser.Error:
        opened = False
    if not opened:
        sys.stdout.write("tensortap: no browser could be opened; open the address above\n")


def _forget() -> None:
    # a forked child has no thread that serves, and must not keep the port
    global _page
    if _page is not None:
        _page.abandon()
    _page = None


os.register_at_fork(after_in_child=_forget)
