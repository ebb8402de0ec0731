"""The live session of this process: `serve`, what it returns, and short forms for a prompt.

`tap.open("host:port")` gives the same verbs for a session in another process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from typing import Any

from msgspec import structs

from tensortap.api.steered import Steered
from tensortap.core.arguments import check_seconds, check_text, checked
from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.history import History
from tensortap.core.limits import format_size, parse_size
from tensortap.core.record import Kind
from tensortap.core.rooms import offers
from tensortap.live import answers, keys
from tensortap.live.address import Address, default_port, parse_address, parse_port
from tensortap.live.server import Server

_session: Session | None = None


def _forget() -> None:
    global _session
    _session = None


os.register_at_fork(after_in_child=_forget)


@checked
def start(
    host: str | None = None,
    port: int | None = None,
    memory: str | int = "50%",
    accept: str | None = None,
) -> Server:
    """Start a server, and create the user's key if there is none."""
    if host is not None:
        check_text("host", host)
    if accept is not None:
        check_text("accept", accept)
    if host is None or host.startswith("[") or host.count(":") == 1:  # with a port
        address = parse_address(host)
    else:
        address = Address("127.0.0.1" if host == "localhost" else host, default_port())
    if port is not None:
        address = Address(address.host, parse_port(port))
    try:
        history, key = History(parse_size(memory, "memory")), keys.make_key()
        server = Server(address, history, key, answer=answers.answer, accept=accept)
    except TensortapError as error:
        if os.strerror(errno.EADDRINUSE) in str(error):
            raise TensortapError(
                f"port {address.port} is in use, perhaps by another live session: open that one "
                f"with tap.open('{address}') or tensortap top, or choose another port, and set "
                "TENSORTAP_PORT to it for the training program"
            ) from None
        raise
    for watch in offers("session.watchers"):
        watch(server)
    return server


@checked
def serve(
    host: str | None = None,
    port: int | None = None,
    memory: str | int = "50%",
    accept: str | None = None,
) -> Session:
    """Listen for training programs in the background: ``session = tap.serve()``.

    It listens on ``TENSORTAP_SERVER``, by default on this machine, port ``TENSORTAP_PORT`` or 2875.
    `memory` bounds the history: when it is full, the oldest records of the most frequent names are
    evicted. Beyond loopback connections are encrypted, and the settings for the training side are
    printed. `accept` takes only programs whose path matches: ``"train.py"``, ``"*/project/*"``.
    The session compares ranks as their records arrive, and raises alerts about them.
    """
    global _session
    if _session is not None and _session.alive:
        if port in (None, _session.address.port):
            if accept is not None:
                _session.server.accept = accept
            _print(f"already listening on {_session.address}")
            return _session
        _session.close()
    _session = Session(start(host, port, memory, accept))
    _print(greeting(_session.server))
    return _session


def greeting(server: Server) -> str:
    """Return where a server listens, and the settings for the training side."""
    address, bound = server.address, format_size(server.history.bound)
    lines = [f"listening on {address}, keeping at most {bound}"]
    if not address.loopback:
        anywhere = address.host in ("0.0.0.0", "::", "*")
        host = socket.gethostname() if anywhere else address.host
        lines += [
            "on the training side, set",
            f"  export TENSORTAP_SERVER={Address(host, address.port)}",
            f"  export TENSORTAP_KEY={keys.key_text(server.key)}",
            "everyone with this key can send and read values; the connection is encrypted",
        ]
    return "\n".join(lines)


def _print(message: str) -> None:
    sys.stdout.write(f"tensortap: {message}\n")
    sys.stdout.flush()


def current() -> Session:
    """Return the session of this process; raise NotFound if there is none."""
    if _session is None:
        raise NotFound(
            "no live session in this process: call tap.serve() first, "
            "or open another one with tap.open('host:port')"
        )
    return _session


class Session(Steered):
    """The live session of this process, which `tap.serve` opens; `tap.open` gives remote ones."""

    def __init__(self, server: Server) -> None:
        super().__init__(server.history)
        self.server = server

    def __repr__(self) -> str:
        return f"<live session at {self.address}{'' if self.alive else ', closed'}>"

    @property
    def address(self) -> Address:
        """Return the address of the session."""
        return self.server.address

    @property
    def alive(self) -> bool:
        """Return whether the session listens."""
        return self.server.alive

    def close(self) -> None:
        """Stop listening; the history can still be read."""
        self.server.close()

    def ask(self, what: str, **arguments: Any) -> bytes:
        """Return the encoded answer to a question of a viewer."""
        return answers.answer(self.server, what, arguments)

    @checked
    def status(self, seconds: float | None = None) -> None:
        """Show names and rates as they arrive, until Ctrl-C or for `seconds`."""
        from rich.console import Group
        from rich.live import Live
        from rich.spinner import Spinner

        from tensortap.api import tables

        check_seconds("seconds", seconds)
        rates = tables.Rates()
        words = "Ctrl-C returns to the prompt; the session goes on"
        spinner = Spinner("dots", words, style="green")
        end = None if seconds is None else time.monotonic() + seconds

        def screen() -> Group:
            overview = answers.overview(self.server)
            rates.update(overview)
            return Group(spinner, tables.summary(structs.replace(overview, recent=()), rates))

        with contextlib.suppress(KeyboardInterrupt), Live(screen(), refresh_per_second=8) as live:
            while end is None or time.monotonic() < end:
                time.sleep(0.25)
                live.update(screen())

    def summary(self) -> None:
        """Print the clients, every name with its latest record, and the recent records."""
        from rich.console import Console

        from tensortap.api import tables

        Console().print(tables.summary(answers.overview(self.server)))


# -- short forms for a prompt -----------------------------------------------------------------


def status(seconds: float | None = None) -> None:
    """Show names and rates as they arrive, until Ctrl-C or for `seconds`; the session goes on."""
    current().status(seconds)


def summary() -> None:
    """Print the clients, every name with its latest record, and the recent records."""
    current().summary()


def get(
    name: str,
    index: int = 0,
    *,
    step: int | None = None,
    rank: int | str | None = None,
    kind: Kind | str | None = None,
) -> Any:
    """Return a copy of a value: the latest, the `index`-th before it, or that of a `step`.

    ``rank="all"`` gives a dict of the values of all ranks, ``rank="whole"`` one tensor, assembled
    from their shards.
    """
    return current().get(name, index, step=step, rank=rank, kind=kind)


def get_all(name: str, *, rank: int | None = None, kind: Kind | str | None = None) -> list[Any]:
    """Return all values of a name in the history, oldest to newest."""
    return current().get_all(name, rank=rank, kind=kind)


def help() -> None:  # noqa: A001  the verb that people expect
    """Print the verbs of a live session."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold dim")
    table.add_column("in this session", style="bold")
    table.add_column("")
    for call, effect in _HELP:
        table.add_row(call, effect)
    Console().print(table)


_HELP = (
    ("session = tap.serve()", "listen for training programs in the background"),
    ("tap.status()", "show what arrives; Ctrl-C returns to the prompt"),
    ("tap.summary()", "print names with their latest record, and the recent records"),
    ('tap.get("loss")', "a copy of the latest value"),
    ('tap.get("loss", 1)', "the value before the latest"),
    ('tap.get("loss", step=40, rank=0)', "the value of a step and rank"),
    ('tap.get_all("loss")', "all values in the history, oldest to newest"),
    ('session.describe("loss")', "shape, dtype, range, mean, deviation, NaN and Inf"),
    ("", ""),
    ('tap.catch(loss, "loss", every=10)', "in the training program: catch a value"),
    ("tap.receipt()", "in the training program: what was captured, and what it cost"),
)
