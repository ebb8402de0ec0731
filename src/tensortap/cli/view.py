"""`tensortap view`: show runs and live sessions in a browser."""

from __future__ import annotations

from typing import Any

import typer

from tensortap.cli.terminal import wait_for_interrupt


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
) -> None:
    """Show runs and live sessions in the browser until Ctrl-C."""
    show_page(*(what or ["runs"]), host=host, port=port, names=name, browser=browser)


def show_page(*what: str, **options: Any) -> None:
    """Show the page until Ctrl-C."""
    from tensortap.page.view import announce_next
    from tensortap.page.view import view as show

    page = show(*what, **options)

    def is_alive() -> bool:
        announce_next(page)
        return bool(page.alive)

    wait_for_interrupt("the page", is_alive)
    page.close()
