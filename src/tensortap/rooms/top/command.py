"""`tensortap top`: show a live table of what arrives."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

from tensortap.cli.terminal import json_option, message, print_json
from tensortap.core.record import Kind, Record

if TYPE_CHECKING:
    from rich.console import Console, Group

    from tensortap.api.open import RemoteSession
    from tensortap.api.tables import Rates
    from tensortap.live.answers import Overview


def top(
    server: str | None = typer.Argument(None, help="host:port. Default: TENSORTAP_SERVER."),
    interval: float = typer.Option(0.5, min=0.05, help="Seconds between updates."),
    once: bool = typer.Option(False, help="Print once and exit."),
    as_json: bool = json_option(
        "address, pid, started, written, written_nbytes, nbytes, bound, evicted, rejected, "
        "clients, names, recent, alerts"
    ),
) -> None:
    """Watch a live session; start one for the time being if none runs on this machine."""
    from tensortap.api import session as live
    from tensortap.api.open import RemoteSession
    from tensortap.core.errors import NotFound
    from tensortap.live.address import parse_address

    own = None
    try:
        view = RemoteSession(server, 10.0)
    except NotFound:
        if once or as_json or server is not None or not parse_address(None).loopback:
            raise
        own = live.start()
        message(f"no session was running; started one on {own.address}")
        view = RemoteSession(str(own.address), 10.0)
    with view:
        if as_json:
            print_json(view.overview())
        elif once:
            view.summary()
        else:
            _watch(view, interval)
    if own is not None:
        own.close()


_KEYS = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|[\s\S]")
_MOVES = {"\x1b[A": -1, "\x1b[B": 1, "\x1b[5~": -20, "\x1b[6~": 20}  # arrows, page up and down
_NOT_FINITE = re.compile(r"\bNaN\b|(?<!-)\bInf\b")  # a mask has -Inf
_MOST = 5  # alerts and programs; `tensortap top --once` and the page show all


class Screen:
    """The part of the names that the keys have chosen."""

    def __init__(self) -> None:
        self.pattern = ""
        self.typing = False
        self.first = 0

    def press(self, key: str) -> bool:
        """Obey a key; return whether it ends the command."""
        if key in _MOVES:
            self.first = max(0, self.first + _MOVES[key])
        elif key == "/" and not self.typing:
            self.typing, self.pattern, self.first = True, "", 0
        elif not self.typing:
            return key == "q"
        elif key in "\r\n\x1b":
            self.typing = False
            self.pattern = "" if key == "\x1b" else self.pattern
        elif key in "\x7f\b":
            self.pattern = self.pattern[:-1]
        elif key.isprintable():
            self.pattern += key
        return False

    def draw(self, overview: Overview, rates: Rates, console: Console) -> Group:
        """Return what fits: alerts, names with NaN or Inf, metrics, others, and the programs."""
        from rich.console import Group
        from rich.text import Text

        from tensortap.api import tables

        keys = "q ends, / filters, ↑ ↓ scroll"
        if self.typing:
            keys = "Enter keeps the filter, Esc ends it"
        pattern = f"   /{self.pattern}" if self.typing or self.pattern else ""
        above: list[Any] = [tables.header(overview, rates), Text(keys + pattern, "dim"), Text()]
        if overview.alerts:
            above += [Text("alerts", "bold red"), tables.alerts_table(overview, _MOST), Text()]
        below: list[Any] = [Text(), tables.programs_table(overview, _MOST)]
        if not overview.names:
            return Group(*above, tables.NOTHING, *below)
        found = [row for row in overview.names if self.pattern.lower() in row.head.name.lower()]
        found.sort(key=lambda row: (not _NOT_FINITE.search(row.line), not _is_metric(row.head)))
        # beside the titles of the columns, and how many more there are
        room = console.height - 2 - len(console.render_lines(Group(*above, *below)))
        room = max(room, 1)
        self.first = max(0, min(self.first, len(found) - room))
        more = max(0, len(found) - self.first - room)
        shown = found[self.first : self.first + room]
        return Group(*above, tables.names_table(shown, more, fold=False), *below)


def _is_metric(head: Record) -> bool:
    number = head.type in ("builtins.float", "builtins.int") or (head.dtype and not head.shape)
    return head.kind is Kind.METRIC or (head.kind is Kind.VALUE and bool(number))


@contextlib.contextmanager
def _keyboard() -> Iterator[Callable[[float], list[str]]]:
    """Yield a function that waits so many seconds for keys, and returns those that were pressed."""
    files = [sys.stdin.fileno()] if sys.stdin.isatty() else []

    def pressed(seconds: float) -> list[str]:
        ready = select.select(files, [], [], seconds)[0]
        return _KEYS.findall(os.read(ready[0], 1024).decode(errors="ignore")) if ready else []

    before = [termios.tcgetattr(file) for file in files]
    try:
        for file in files:
            tty.setcbreak(file)
        yield pressed
    finally:
        for file, mode in zip(files, before, strict=True):
            termios.tcsetattr(file, termios.TCSADRAIN, mode)


def _watch(view: RemoteSession, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from tensortap.api import tables

    console, screen, rates = Console(), Screen(), tables.Rates()
    live = Live(console=console, screen=console.is_terminal, auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), _keyboard() as pressed, live:
        keys: list[str] = []
        while not any(screen.press(key) for key in keys):
            overview = view.overview()
            rates.update(overview)
            live.update(screen.draw(overview, rates, console), refresh=True)
            keys = pressed(interval)
