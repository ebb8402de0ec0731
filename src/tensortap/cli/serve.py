"""`tensortap serve`: keep a live session running."""

from __future__ import annotations

import contextlib
import resource

import typer

from tensortap.cli.terminal import json_option, message, print_json, wait_for_interrupt


def serve(
    host: str | None = typer.Option(None, help="Default: TENSORTAP_SERVER, or this machine."),
    port: int | None = typer.Option(None, help="Default: TENSORTAP_PORT, or 2875."),
    memory: str = typer.Option("50%", help="Bound of the history: 8GB, or a share of the memory."),
    accept: str | None = typer.Option(None, help="Take only programs like train.py, */project/*."),
    as_json: bool = json_option("address"),
) -> None:
    """Listen for training programs until Ctrl-C; watch with tensortap top or tap.open()."""
    from tensortap.api import session as live

    with contextlib.suppress(OSError, ValueError):  # each connection takes a descriptor
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server = live.start(host, port, memory, accept)
    if as_json:
        print_json({"address": str(server.address)})
    else:
        print(f"tensortap: {live.greeting(server)}", flush=True)
    wait_for_interrupt("the session", lambda: server.alive)
    server.close()
    message(f"received {server.history.written:,} records")
