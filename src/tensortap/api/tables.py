"""A live session as people see it in a terminal or a notebook."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tensortap.limits import format_size
from tensortap.record import Kind
from tensortap.server.questions import ClientRow, NameRow, Overview
from tensortap.text import tensors as text
from tensortap.viz.fitted_table import FittedTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

    from tensortap.api.run import Run


_LONGEST = 500  # characters of anybody's text that a terminal is to show
_WIDE = 100  # columns


def plain(text: str) -> str:
    """Text from a stranger, fit for a terminal: no control characters, no books."""
    shown = "".join(c if c.isprintable() else "�" for c in text[:_LONGEST])
    return shown if len(text) <= _LONGEST else f"{shown}…"


def ago(time_ns: int) -> str:
    """How long ago, in a few characters."""
    seconds = max(0.0, time.time() - time_ns / 1e9)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago" if seconds >= 1 else "now"


class Rates:
    """Records and bytes a second between two looks."""

    def __init__(self) -> None:
        self._before: tuple[float, int, int] | None = None
        self.records = self.nbytes = 0.0

    def look(self, written: int, nbytes: int) -> None:
        """Take the counts of now."""
        now = time.monotonic()
        if self._before is not None and now > self._before[0]:
            passed = now - self._before[0]
            self.records = (written - self._before[1]) / passed
            self.nbytes = (nbytes - self._before[2]) / passed
        self._before = (now, written, nbytes)

    def __str__(self) -> str:
        return f"{self.records:,.0f} records/s, {format_size(self.nbytes)}/s"


def names_table(view: Overview) -> FittedTable:
    """All names with their latest capture."""
    return rows_table(view.names)


def rows_table(rows: Sequence[NameRow], most: int = 200) -> FittedTable:
    """Names with their latest record; a narrow terminal has no room for how many and how fast."""
    return FittedTable(lambda width: _rows(rows, most, width >= _WIDE))


def _rows(rows: Sequence[NameRow], most: int, wide: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold dim", expand=False)
    table.add_column("name", style="bold", overflow="fold")
    ranked = any(row.head.world_size > 1 for row in rows)
    kinds = any(row.head.kind is not Kind.VALUE for row in rows)
    if kinds:
        table.add_column("kind", no_wrap=True)
    if ranked:
        table.add_column("rank", justify="right")
    table.add_column("step", justify="right", style="cyan")
    trends = any(row.trend for row in rows)
    if trends:
        table.add_column("trend", no_wrap=True, min_width=8)
    rates = wide and any(row.rate for row in rows)
    if rates:
        table.add_column("a second", justify="right", no_wrap=True)
    held = wide or any(row.evicted for row in rows)  # what is gone is said in any case
    if held:
        table.add_column("held", justify="right")
    table.add_column("latest", overflow="fold")
    table.add_column("when", justify="right", style="dim", no_wrap=True)
    for row in rows[:most]:
        head = row.head
        cells: list[RenderableType] = [Text(plain(head.name))]
        if kinds:
            cells.append(_kind(head.kind))
        if ranked:
            cells.append(str(head.rank))
        cells.append(str(head.step))
        if trends:
            cells.append(_trend(row.trend if wide else row.trend[-8:]))
        if rates:
            cells.append(text.number(row.rate) if row.rate else "")
        if held:
            cells.append(_held(row))
        cells.extend((text.styled(plain(row.line)), ago(head.time_ns)))
        table.add_row(*cells)
    if len(rows) > most:
        table.add_row(Text(f"… and {len(rows) - most} more", style="dim"))
    return table


def _kind(kind: Kind) -> Text:
    from rich.text import Text

    return Text(kind.value, style="bold red" if kind is Kind.ALERT else "dim")


def _trend(numbers: Sequence[float]) -> Text:
    from rich.text import Text

    shown = Text(text.sparkline(numbers), style="blue")
    shown.highlight_regex("!", style="bold red")
    return shown


def _held(row: NameRow) -> str:
    return f"{row.held} (+{row.evicted} gone)" if row.evicted else str(row.held)


def recent_table(view: Overview) -> Table:
    """The last captures in the order of their time."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("time", "name", "step", "line"):
        table.add_column(column, style="dim" if column == "time" else "", overflow="fold")
    for row in view.recent:
        head = row.head
        moment = time.strftime("%H:%M:%S", time.localtime(head.time_ns / 1e9))
        rank = f" rank {head.rank}" if head.world_size > 1 else ""
        where = Text(f"step {head.step}{rank}", style="cyan")
        if head.kind is not Kind.VALUE:
            where = Text.assemble(where, " ", _kind(head.kind))
        line = text.styled(plain(row.line))
        table.add_row(moment, Text(plain(head.name), style="bold"), where, line)
    return table


def alerts_table(view: Overview) -> Table:
    """The last alerts: since when, of what, and what is wrong with it."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("when", "where", "message"):
        table.add_column(column, overflow="fold")
    for row in view.alerts:
        head = row.head
        rank = f" rank {head.rank}" if head.world_size > 1 else ""
        where = Text.assemble((plain(head.name), "bold"), (f"  step {head.step}{rank}", "cyan"))
        when = Text(ago(head.time_ns), style="dim")
        table.add_row(when, where, Text(plain(row.line), style="red"))
    return table


def header(view: Overview, rates: Rates | None = None) -> Table:
    """The session in a few lines: where, how much, who, and what is missing."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    there = sum(client.connected for client in view.clients)
    speed = f"   {rates}" if rates is not None else ""
    table.add_row(
        Text(f"tensortap on {view.address}", style="bold"),
        f"{_programs(len(view.clients))}, {there} connected   {view.written:,} records, "
        f"{format_size(view.written_nbytes)}{speed}",
    )
    memory = f"{format_size(view.nbytes)} held of at most {format_size(view.bound)}"
    if view.evicted:
        memory += f"; {view.evicted:,} older captures made room"
    table.add_row(Text("memory", style="dim"), memory)
    for client in view.clients[:20]:
        table.add_row(Text(f"pid {client.pid}", style="dim"), _client(client))
    if len(view.clients) > 20:
        table.add_row("", f"… and {len(view.clients) - 20} more programs")
    if view.rejected:
        reasons = ", ".join(f"{count:,} {plain(why)}" for why, count in view.rejected.items())
        table.add_row(Text("refused", style="red"), Text(reasons))
    return table


def _programs(count: int) -> str:
    return f"{count} program" if count == 1 else f"{count} programs"


def _client(client: ClientRow) -> Text:
    from rich.text import Text

    state = "sending" if client.connected else "gone"
    rank = f" rank {client.rank} of {client.world_size}" if client.world_size > 1 else ""
    line = Text(
        f"{plain(client.program)} on {plain(client.host)}{rank}: {state}"
        + (f" over {client.path}" if client.connected else "")
        + f", {client.records:,} records, {format_size(client.nbytes)}"
    )
    if client.dropped:
        reasons = ", ".join(
            f"{count:,} {plain(why)}" for why, count in client.reasons.items() if count
        )
        line.append(f"; dropped {client.dropped:,} ({reasons})", style="yellow")
    return line


def summary(view: Overview, rates: Rates | None = None) -> Group:
    """The whole session: who, names with their latest capture, recent captures."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [header(view, rates)]
    if not view.names and not view.alerts:
        hint = 'nothing caught yet: put tap.catch(value, "name") into the training program'
        parts.extend((Text(), Text(hint, style="dim")))
        return Group(*parts)
    if view.alerts:
        parts.extend((Text(), Text("alerts", style="bold red"), alerts_table(view)))
    parts.extend((Text(), names_table(view)))
    if view.recent:
        parts.extend((Text(), Text("recent", style="bold dim"), recent_table(view)))
    return Group(*parts)


def run_summary(run: Run) -> Group:
    """A run: when and what ran, names with their latest record, what is missing."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    info, reader = run.reader.info, run.reader
    table = Table.grid(padding=(0, 2))
    state = f"ended {info.ended}" if info.ended else "not ended: still running, or cut off"
    table.add_row(Text(f"run {run.path}", style="bold"), f"started {info.started}, {state}")
    count = sum(reader.counts().values())
    table.add_row(Text("records", style="dim"), f"{count:,} of ranks {reader.ranks}")
    for rank, nbytes in reader.truncated.items():
        cut = f"rank {rank}: {nbytes:,} bytes at the end were cut off in mid-write"
        table.add_row(Text("cut", style="yellow"), cut)
    missing = len(run.missing())
    if missing:
        table.add_row(Text("missing", style="yellow"), f"{missing:,} found no room (run.missing())")
    return Group(table, Text(), rows_table(run.rows()))
