"""The verbs of a live session: serve, status, summary, get, get_all, describe, ingest_all, help.

They work on the session of this process; `tap.open("host:port")` gives a reader of one that
runs elsewhere.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import errno
import keyword
import os
import sys
import time
import unicodedata
from collections.abc import Callable
from typing import Any

from tensortap import frameworks as arrays
from tensortap.api import tables, verbs
from tensortap.errors import NotFound, TensortapError, WireError
from tensortap.history import History
from tensortap.limits import format_size, parse_size
from tensortap.readers.reader import value_of
from tensortap.record import Kind, Record
from tensortap.server import answers
from tensortap.server.server import Server
from tensortap.wire import keys
from tensortap.wire.address import Address, default_port, parse_address, parse_port

_server: Server | None = None


def _forget() -> None:
    global _server
    _server = None


os.register_at_fork(after_in_child=_forget)


def start(
    host: str = "127.0.0.1",
    port: int | None = None,
    memory: str | int = "50%",
    keep: Callable[[list[Record]], None] | None = None,
) -> Server:
    """A new server; the key is made if this user had none. `keep` gets all that arrives, too."""
    # a server is where people look on: the host may be written with its port
    with_port = host.startswith("[") or host.count(":") == 1
    address = parse_address(host) if with_port else None
    if address is None:
        address = Address("127.0.0.1" if host == "localhost" else host, default_port())
    if port is not None:
        address = Address(address.host, parse_port(port))
    try:
        history, key = History(parse_size(memory)), keys.make_key()
        return Server(address, history, key, answer=answers.answer, keep=keep)
    except TensortapError as error:
        if os.strerror(errno.EADDRINUSE) in str(error):
            raise TensortapError(
                f"port {address.port} is in use, perhaps by another live session: look at that "
                f"one with tap.open('{address}') or tensortap top, or serve on another port"
            ) from None
        raise


def serve(host: str = "127.0.0.1", port: int | None = None, memory: str | int = "50%") -> Server:
    """Listen for training programs, in the background: ``tap.serve()``.

    `memory` bounds what is kept: the oldest of the most repeated names go first. With another
    `host` than this machine the connection is encrypted, and what to set on the training side
    is printed.
    """
    global _server
    if _server is not None and _server.alive:
        if port in (None, _server.address.port):
            _say(f"already listening on {_server.address}")
            return _server
        _server.close()
    _server = start(host, port, memory)
    _say(greeting(_server))
    return _server


def greeting(server: Server) -> str:
    """Where a server listens, and what the training side needs to find it."""
    address, bound = server.address, format_size(server.history.bound)
    lines = [f"listening on {address}, keeping at most {bound}"]
    if not address.loopback:
        host = _own_name() if address.host in ("0.0.0.0", "::", "*") else address.host
        lines.append("on the training side, set")
        lines.append(f"  export TENSORTAP_SERVER={Address(host, address.port)}")
        lines.append(f"  export TENSORTAP_KEY={keys.key_text(server.handshake.key)}")
        lines.append("whoever has the key can send and look; the connection is encrypted")
    return "\n".join(lines)


def _own_name() -> str:
    import socket

    return socket.gethostname()


def _say(words: str) -> None:
    sys.stdout.write(f"tensortap: {words}\n")
    sys.stdout.flush()


def current() -> Server:
    """The session of this process."""
    if _server is None:
        raise NotFound(
            "no live session in this process: call tap.serve() first, "
            "or look at another one with tap.open('host:port')"
        )
    return _server


def close() -> None:
    """Stop listening; what was caught stays."""
    if _server is not None:
        _server.close()


def status(seconds: float | None = None) -> None:
    """Show what arrives, live, until Ctrl-C (or for `seconds`); the session goes on."""
    from rich.console import Group
    from rich.live import Live
    from rich.spinner import Spinner

    server = current()
    rates = tables.Rates()
    spinner = Spinner("dots", "Ctrl-C returns to the prompt; the session goes on", style="green")
    end = None if seconds is None else time.monotonic() + seconds

    def look() -> Group:
        view = answers.overview(server)
        rates.look(view.written, view.written_nbytes)
        return Group(tables.header(view, rates), spinner)

    with contextlib.suppress(KeyboardInterrupt), Live(look(), refresh_per_second=8) as live:
        while end is None or time.monotonic() < end:
            time.sleep(0.25)
            live.update(look())


def summary() -> None:
    """Print who sends, every name with its latest capture, and the recent captures."""
    from rich.console import Console

    Console().print(tables.summary(answers.overview(current())))


def get(
    name: str,
    index: int = 0,
    *,
    step: int | None = None,
    rank: int | str | None = None,
    kind: Kind | str | None = None,
) -> Any:
    """A captured value, yours to change: the latest, or `index` before it, or that of a `step`.

    ``rank="all"`` gives a dict of the values of all ranks.
    """
    return verbs.get(current().history, name, index, step=step, rank=rank, kind=kind)


def get_all(name: str, *, rank: int | None = None, kind: Kind | str | None = None) -> list[Any]:
    """All values that are held under a name, oldest to newest."""
    return verbs.get_all(current().history, name, rank=rank, kind=kind)


def describe(
    name: str,
    index: int = 0,
    *,
    step: int | None = None,
    rank: int | None = None,
    kind: Kind | str | None = None,
) -> None:
    """Print what is held under a name, and the latest in a line a tensor."""
    history = current().history
    gone = history.evicted.get(name, 0)
    verbs.describe(history, name, index, step=step, rank=rank, kind=kind, evicted=gone)


def ingest_all(overwrite: bool = False) -> dict[str, str]:
    """Put the latest of every name into the caller's globals, under valid names.

    Variables that exist, and builtins, stay as they are unless `overwrite`. Returns which
    name went into which variable.
    """
    target = sys._getframe(1).f_globals
    taken: dict[str, str] = {}
    kept: list[str] = []
    for _, record in current().history.latest():
        if record.kind is Kind.ALERT:
            continue  # about the value of that name, which is what is wanted
        if record.value is None and record.stats is not None:
            continue  # of a tracked tensor only statistics are there
        name = record.name if not record.rank else f"{record.name}_rank{record.rank}"
        variable = _free_name(identifier(name), taken)
        exists = variable in target or hasattr(builtins, variable)
        if exists and not overwrite:
            kept.append(variable)
            continue
        try:
            target[variable] = arrays.rebuild(value_of(record))
        except WireError as error:  # of one client; the values of the others are good
            _say(f"no {variable}: {error}")
            continue
        taken[variable] = record.name
    if kept:
        _say(f"kept as they were: {', '.join(kept)} (overwrite=True replaces them)")
    return {name: variable for variable, name in taken.items()}


def identifier(name: str) -> str:
    """A valid variable name for any name.

    >>> identifier("blocks.3.attn")
    'blocks_3_attn'
    """
    # the form in which Python reads a variable's name
    normal = unicodedata.normalize("NFKC", name)
    words = "".join(c if f"_{c}".isidentifier() else " " for c in normal).split()
    variable = "_".join(words).strip("_") or "value"
    if not variable[0].isidentifier():
        variable = f"_{variable}"
    return f"{variable}_" if keyword.iskeyword(variable) else variable


def _free_name(variable: str, taken: collections.abc.Container[str]) -> str:
    free, count = variable, 0
    while free in taken:
        count += 1
        free = f"{variable}_{count}"
    return free


def help() -> None:  # noqa: A001  the verb that people expect
    """Print what can be done with a live session."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold dim")
    table.add_column("in this session", style="bold")
    table.add_column("")
    for call, what in _HELP:
        table.add_row(call, what)
    Console().print(table)


_HELP = (
    ("tap.serve()", "listen for training programs, in the background"),
    ("tap.status()", "what arrives, live; Ctrl-C returns to the prompt"),
    ("tap.summary()", "names with their latest capture, and the recent captures"),
    ('tap.get("loss")', "the latest value, yours to change"),
    ('tap.get("loss", 1)', "the one before the latest"),
    ('tap.get("loss", step=40, rank=0)', "the one of that step and rank"),
    ('tap.get_all("loss")', "all that are held, oldest to newest"),
    ('tap.describe("loss")', "shape, dtype, range, mean, deviation, NaN and Inf"),
    ("tap.ingest_all()", "the latest of every name as variables of yours"),
    ("", ""),
    ('tap.catch(loss, "loss", every=10)', "in the training program: catch a value"),
    ("tap.receipt()", "in the training program: what was caught, and what it cost"),
)
