"""`tap.view`: show runs and live sessions in the browser."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.core.arguments import checked
from tensortap.core.errors import MissingExtra, NotFound

if TYPE_CHECKING:
    from tensortap.page.server import Page

_page: Any = None
_printed = ""  # the token of the address that was printed last


@checked
def view(
    run: Any = None,
    *more: Any,
    host: str = "127.0.0.1",
    port: int | None = None,
    names: Iterable[str] = (),
    browser: bool = True,
) -> Page:
    """Show runs and live sessions in the browser: ``tap.view("runs")``, ``tap.view(run)``.

    Takes any number of runs, folders of runs and live sessions (``"host:port"``, or what
    `tap.serve` and `tap.open` returned); by default the live session and the open run of this
    process. `names` are more host names under which browsers reach this machine, such as that of
    a proxy. A second call adds to the same page. Returns the page; `close` ends it.
    """
    global _page
    try:
        from tensortap.page.catalog import Catalog
        from tensortap.page.server import Page
    except ImportError as error:
        missing = error.name or "starlette"
        raise MissingExtra.of(f"the page needs {missing}", "view") from None
    for name in (names := tuple(names)):
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"names must be host names such as 'gpu7.example.com', got {name!r}")
    is_new = _page is None or not _page.alive
    catalog = Catalog() if is_new else _page.catalog
    ids = [catalog.add(each) for each in (_of_this_process() if run is None else [run, *more])]
    if is_new:
        _page = Page(catalog, host, port, names)
    _announce(_page, port if is_new else _page.port)
    if browser:
        _open_browser(_page, next(filter(None, ids), ""))
    found: Page = _page
    return found


def _of_this_process() -> list[Any]:
    """Return the live session and the run of this process, else the folder ``runs``."""
    from tensortap.api import session as live
    from tensortap.runs.init import opened

    shown: list[Any] = []
    with contextlib.suppress(NotFound):  # no live session
        shown.append(live.current())
    run = opened()
    if run is not None:
        shown.append(run)
    if not shown and Path("runs").is_dir():
        shown.append(Path("runs"))
    if not shown:
        raise NotFound(
            "nothing to show: this process has no live session (tap.serve) and no run (tap.init), "
            "and there is no folder 'runs'; name one: tap.view('path/to/runs')"
        )
    return shown


def _announce(page: Any, port: int | None) -> None:
    """Print where the page is, and who can open it."""
    from tensortap.live.address import Address
    from tensortap.page.server import PORT

    _print(f"the page is on {_new_address(page)}")
    if port is None and page.port != PORT:
        _print(f"port {PORT} is in use; the page took the next free port, {page.port}")
    if not Address(page.host, page.port).loopback:
        _print(
            "other machines can reach the page: whoever opens this address first gets in, and the "
            "connection is not encrypted; an ssh tunnel to 127.0.0.1 is safer"
        )


def announce_next(page: Any) -> None:
    """Print another address if the last one has been used, for another browser."""
    if not page.access.is_unused(_printed):
        _print(f"for another browser: {_new_address(page)}")


def _new_address(page: Any) -> str:
    global _printed
    url = str(page.url)
    _printed = url.rpartition("=")[2]
    return url


def _print(line: str) -> None:
    sys.stdout.write(f"tensortap: {line}\n")
    sys.stdout.flush()


def _open_browser(page: Any, id: str = "") -> None:  # noqa: A002
    import webbrowser
    from urllib.parse import quote

    try:
        opened = webbrowser.open(page.redirect_file(f"#run={quote(id)}" if id else "").as_uri())
    except webbrowser.Error:
        opened = False
    if not opened:
        _print("could not open a browser; open the address above")


def _after_fork() -> None:
    # a forked child has no thread that serves, and must not keep the port
    global _page
    if _page is not None:
        _page.abandon()
    _page = None


os.register_at_fork(after_in_child=_after_fork)
