"""`tensortap view`: the page on runs and live sessions."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

import typer


def view(
    what: list[str] = typer.Argument(
        None, help="Runs, folders of runs, live sessions as host:port; else the folder runs."
    ),
    host: str = typer.Option("127.0.0.1", help="Where to listen; beyond this machine it says so."),
    port: int | None = typer.Option(None, help="2876, or the next that is free."),
    name: list[str] = typer.Option(
        [], help="Another name that browsers reach it under, such as that of a proxy."
    ),
    browser: bool = typer.Option(True, "--browser/--no-browser", help="Open it in the browser."),
) -> None:
    """Look at runs and live sessions in the browser, until Ctrl-C."""
    stay_up(*(what or ["runs"]), host=host, port=port, names=name, browser=browser)


def stay_up(*what: str, **options: Any) -> None:
    """Show the page until Ctrl-C."""
    from tensortap.web.view import view as show

    page = show(*what, **options)
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    print("tensortap: Ctrl-C ends it", file=sys.stderr)
    while not done.wait(0.5):
        if not page.alive:
            print("tensortap: the page ended with an error", file=sys.stderr)
            raise typer.Exit(1)
    page.close()
