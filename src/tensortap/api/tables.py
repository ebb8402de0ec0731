"""Tables of live sessions and runs, for terminals and notebooks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tensortap.core.files import plain
from tensortap.core.limits import format_size
from tensortap.core.record import Kind, Record
from tensortap.live.answers import ClientRow, NameRow, Overview
from tensortap.text.tensors import FittedTable, sparkline, styled

if TYPE_CHECKING:
    from tensortap.api.run import Run

_WIDE = 100  # columns of a terminal that has room for counts
_MOST_NAMES = 200
_SHORT_TREND = 8
NOTHING = Text(
    'nothing caught yet: add tap.catch(value, "name") to the training program', style="dim"
)


def ago(time_ns: int) -> str:
    """Return how long ago a time was, in a few characters."""
    seconds = max(0.0, time.time() - time_ns / 1e9)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago" if seconds >= 1 else "now"


class Rates:
    """Records and bytes per second between two updates."""

    def __init__(self) -> None:
        self._before: tuple[float, int, int] | None = None
        self.records = self.nbytes = 0.0

    def update(self, overview: Overview) -> None:
        now, written, nbytes = time.monotonic(), overview.written, overview.written_nbytes
        if self._before is not None and now > self._before[0]:
            seconds = now - self._before[0]
            self.records = (written - self._before[1]) / seconds
            self.nbytes = (nbytes - self._before[2]) / seconds
        self._before = (now, written, nbytes)

    def __str__(self) -> str:
        return f"{self.records:,.0f} records/s, {format_size(self.nbytes)}/s"


def names_table(rows: Sequence[NameRow], more: int = 0, *, fold: bool = True) -> FittedTable:
    """Return names with their latest record; a wide terminal also shows counts.

    With `fold`, long lines are continued in the next line; without, they are cut.
    """
    return FittedTable(lambda width: _names_table(rows, more, width >= _WIDE, fold))


def _names_table(rows: Sequence[NameRow], more: int, wide: bool, fold: bool) -> Table:
    heads = [row.head for row in rows]
    trend = slice(None) if wide else slice(-_SHORT_TREND, None)
    long = {"overflow": "fold"} if fold else {"overflow": "ellipsis", "no_wrap": True}
    columns: list[tuple[bool, str, dict[str, Any], Callable[[NameRow], RenderableType]]] = [
        (True, "name", {"style": "bold", **long}, lambda r: Text(plain(r.head.name))),
        (any(head.kind is not Kind.VALUE for head in heads), "kind", {"no_wrap": True},
         lambda r: _kind(r.head.kind)),
        (any(head.world_size > 1 for head in heads), "rank", {"justify": "right"},
         lambda r: str(r.head.rank)),
        (True, "step", {"justify": "right", "style": "cyan"}, lambda r: str(r.head.step)),
        (any(row.trend for row in rows), "trend", {"no_wrap": True, "min_width": _SHORT_TREND},
         lambda r: _trend(r.trend[trend])),
        # evictions are always shown
        (wide or any(row.evicted for row in rows), "records", {"justify": "right"},
         lambda r: f"{r.records} (+{r.evicted} evicted)" if r.evicted else str(r.records)),
        (True, "latest", long, lambda r: styled(plain(r.line))),
        (True, "when", {"justify": "right", "style": "dim", "no_wrap": True},
         lambda r: ago(r.head.time_ns)),
    ]  # fmt: skip
    table = Table(box=None, pad_edge=False, header_style="bold dim", expand=False)
    for shown, title, style, _ in columns:
        if shown:
            table.add_column(title, **style)
    for row in rows[:_MOST_NAMES]:
        table.add_row(*(cell(row) for shown, _, _, cell in columns if shown))
    more += max(0, len(rows) - _MOST_NAMES)
    if more:
        table.add_row(Text(f"… {more:,} more", style="dim"))
    return table


def _kind(kind: Kind) -> Text:
    return Text(kind.value, style="bold red" if kind is Kind.ALERT else "dim")


def _trend(numbers: Sequence[float]) -> Text:
    line = Text(sparkline(numbers), style="blue")
    line.highlight_regex("!", style="bold red")
    return line


def _step(head: Record) -> str:
    return f"step {head.step}" + (f" rank {head.rank}" if head.world_size > 1 else "")


def recent_table(overview: Overview) -> Table:
    """Return the most recent records of all names, oldest to newest."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("time", "name", "step", "line"):
        table.add_column(column, style="dim" if column == "time" else "", overflow="fold")
    for row in overview.recent:
        head = row.head
        clock = time.strftime("%H:%M:%S", time.localtime(head.time_ns / 1e9))
        where = Text(_step(head), style="cyan")
        if head.kind is not Kind.VALUE:
            where = Text.assemble(where, " ", _kind(head.kind))
        name = Text(plain(head.name), style="bold")
        table.add_row(clock, name, where, styled(plain(row.line)))
    return table


def alerts_table(overview: Overview, most: int | None = None) -> Table:
    """Return the most recent alerts: when, where, and what is wrong; of `most`, one line each."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for row in overview.alerts[-most:] if most else overview.alerts:
        head = row.head
        when = Text(ago(head.time_ns), style="dim")
        where = Text.assemble((plain(head.name), "bold"), (f"  {_step(head)}", "cyan"))
        cells = [when, where, Text(plain(row.line), style="red")]
        if most:
            cells = [Text("  ", no_wrap=True, overflow="ellipsis").join(cells)]
        table.add_row(*cells)
    return table


def header(overview: Overview, rates: Rates | None = None) -> Table:
    table = Table.grid(padding=(0, 2))
    clients = overview.clients
    connected = sum(client.connected for client in clients)
    programs = f"{len(clients)} {'program' if len(clients) == 1 else 'programs'}"
    received = f"{overview.written:,} records, {format_size(overview.written_nbytes)}"
    speed = f"   {rates}" if rates is not None else ""
    table.add_row(
        Text(f"tensortap on {overview.address}", style="bold"),
        f"{programs}, {connected} connected   {received}{speed}",
    )
    memory = f"{format_size(overview.nbytes)} of at most {format_size(overview.bound)}"
    if overview.evicted:
        memory += f"; {overview.evicted:,} older records evicted"
    table.add_row(Text("memory", style="dim"), memory)
    return table


def programs_table(overview: Overview, most: int = 20) -> Table:
    """Return the programs that send records, what they dropped, and what was rejected."""
    table = Table.grid(padding=(0, 2))
    clients = overview.clients
    for client in clients[:most]:
        table.add_row(Text(f"pid {client.pid}", style="dim"), _client_line(client))
    if len(clients) > most:
        table.add_row("", f"… {len(clients) - most:,} more programs")
    if overview.rejected:
        counts = ", ".join(f"{plain(why)}: {n:,}" for why, n in overview.rejected.items())
        table.add_row(Text("rejected", style="red"), Text(counts))
    return table


def _client_line(client: ClientRow) -> Text:
    state = f"connected over {client.path}" if client.connected else "disconnected"
    rank = f" rank {client.rank} of {client.world_size}" if client.world_size > 1 else ""
    line = Text(
        f"{plain(client.program)} on {plain(client.host)}{rank}: {state}, "
        f"{client.records:,} records, {format_size(client.nbytes)}"
    )
    if client.dropped:
        reasons = ", ".join(f"{n:,} {plain(why)}" for why, n in client.reasons.items() if n)
        line.append(f"; dropped {client.dropped:,} ({reasons})", style="yellow")
    return line


def summary(overview: Overview, rates: Rates | None = None) -> Group:
    """Return the whole session: clients, alerts, names with their latest record, recent records."""
    parts: list[RenderableType] = [header(overview, rates), programs_table(overview)]
    if not overview.names and not overview.alerts:
        return Group(*parts, Text(), NOTHING)
    if overview.alerts:
        parts += [Text(), Text("alerts", style="bold red"), alerts_table(overview)]
    parts += [Text(), names_table(overview.names)]
    if overview.recent:
        parts += [Text(), Text("recent", style="bold dim"), recent_table(overview)]
    return Group(*parts)


def run_summary(run: Run) -> Group:
    """Return when a run was written, its names with their latest record, and what it lacks."""
    info, reader = run.reader.info, run.reader
    table = Table.grid(padding=(0, 2))
    state = f"ended {info.ended}" if info.ended else "not ended: in training, or killed"
    table.add_row(Text(f"run {run.path}", style="bold"), f"started {info.started}, {state}")
    ranks = ", ".join(map(str, reader.ranks))
    counts = reader.counts()
    count = sum(counts.values())
    table.add_row(Text("records", style="dim"), f"{count:,} of ranks {ranks}")
    for rank, nbytes in reader.truncated.items():
        lost = f"rank {rank}: the last {nbytes:,} bytes were not written completely"
        table.add_row(Text("truncated", style="yellow"), lost)
    dropped = len(run.missing())
    if dropped:
        table.add_row(Text("dropped", style="yellow"), f"{dropped:,} over budget (run.missing())")
    more = max(0, len(counts) - _MOST_NAMES)
    return Group(table, Text(), names_table(run.rows(_MOST_NAMES), more))
