"""`tensortap top`: a live table of what arrives."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from tensortap.api.open import View


def top(
    server: str | None = typer.Argument(None, help="host:port; else TENSORTAP_SERVER, or here."),
    interval: float = typer.Option(0.5, min=0.05, help="Seconds between two looks."),
    once: bool = typer.Option(False, help="Look once and leave."),
    as_json: bool = typer.Option(False, "--json", help="Look once, as JSON."),
) -> None:
    """Watch a live session; where none runs on this machine, start one for as long as it shows."""
    from tensortap.api import session as live
    from tensortap.api.open import View
    from tensortap.errors import NotFound
    from tensortap.wire.address import parse_address

    own = None
    try:
        view = View(server, 3.0)
    except NotFound:
        if once or as_json or server is not None or not parse_address(None).loopback:
            raise
        own = live.start("127.0.0.1", parse_address(None).port)
        print(f"tensortap: no session was running; this one is on {own.address}", file=sys.stderr)
        view = View(str(own.address), 3.0)
    with view:
        if as_json:
            import json

            import msgspec

            # in ASCII: names are anybody's, and a terminal obeys more than the old control codes
            # through msgspec first: NaN is no JSON
            print(json.dumps(json.loads(msgspec.json.encode(view.overview()))))
        elif once:
            view.summary()
        else:
            _watch(view, interval)
    if own is not None:
        own.close()


def _watch(view: View, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from tensortap.api import tables

    rates = tables.Rates()
    console = Console()
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as screen:
        try:
            while True:
                overview = view.overview()
                rates.look(overview.written, overview.written_nbytes)
                screen.update(tables.summary(overview, rates), refresh=True)
                time.sleep(interval)
        except KeyboardInterrupt:
            pass
