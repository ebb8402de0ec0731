"""`tensortap top`: show a live table of what arrives."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

from tensortap.cli.terminal import message, print_json

if TYPE_CHECKING:
    from tensortap.api.open import RemoteSession


def top(
    server: str | None = typer.Argument(None, help="host:port. Default: TENSORTAP_SERVER."),
    interval: float = typer.Option(0.5, min=0.05, help="Seconds between updates."),
    once: bool = typer.Option(False, help="Print once and exit."),
    as_json: bool = typer.Option(False, "--json", help="Print once, as JSON."),
) -> None:
    """Watch a live session; start one for the time being if none runs on this machine."""
    from tensortap.api import session as live
    from tensortap.api.open import RemoteSession
    from tensortap.core.errors import NotFound
    from tensortap.live.address import parse_address

    own = None
    try:
        view = RemoteSession(server, 3.0)
    except NotFound:
        if once or as_json or server is not None or not parse_address(None).loopback:
            raise
        own = live.start("127.0.0.1", parse_address(None).port)
        message(f"no session was running; started one on {own.address}")
        view = RemoteSession(str(own.address), 3.0)
    with view:
        if as_json:
            import json

            import msgspec

            # json escapes non-ASCII, which a terminal could obey; msgspec turns NaN into null
            print_json(json.loads(msgspec.json.encode(view.overview())))
        elif once:
            view.summary()
        else:
            _watch(view, interval)
    if own is not None:
        own.close()


def _watch(view: RemoteSession, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from tensortap.api import tables

    rates = tables.Rates()
    console = Console()
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as screen:
        try:
            while True:
                overview = view.overview()
                rates.update(overview)
                screen.update(tables.summary(overview, rates), refresh=True)
                time.sleep(interval)
        except KeyboardInterrupt:
            pass
