"""`tensortap view`: show runs and live sessions in a browser."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import typer

from tensortap.cli.terminal import json_option, print_json, wait_for_interrupt


def view(
    what: list[str] = typer.Argument(
        None, help="Runs, their URLs, folders of runs, live sessions as host:port. Default: runs."
    ),
    host: str = typer.Option("127.0.0.1", help="Address to listen on. Warns beyond this machine."),
    port: int | None = typer.Option(None, help="Default: 2876, or the next free port."),
    name: list[str] = typer.Option(
        [], help="Another host name under which browsers reach the page, such as a proxy's."
    ),
    browser: bool = typer.Option(True, "--browser/--no-browser", help="Open a browser."),
    as_json: bool = json_option("address"),
) -> None:
    """Show runs and live sessions in the browser until Ctrl-C."""
    show_page(
        *(what or ["runs"]), host=host, port=port, names=name, browser=browser, as_json=as_json
    )


def show_page(*what: str, as_json: bool = False, **options: Any) -> None:
    """Show the page until Ctrl-C."""
    from tensortap.page.view import announce_next
    from tensortap.page.view import view as show

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        page = show(*what, **options)
    if as_json:
        print_json({"address": page.url})

    def is_alive() -> bool:
        if not as_json:
            announce_next(page)
        return bool(page.alive)

    wait_for_interrupt("the page", is_alive)
    page.close()
