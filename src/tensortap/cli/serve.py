"""`tensortap serve`: a live session that stays up."""

from __future__ import annotations

import signal
import sys
import threading

import typer


def serve(
    host: str = typer.Option("127.0.0.1", help="Where to listen; beyond this machine encrypted."),
    port: int | None = typer.Option(None, help="2875, or TENSORTAP_PORT."),
    memory: str = typer.Option("50%", help="How much to keep: 8GB, or a share of the memory."),
) -> None:
    """Listen for training programs until Ctrl-C; look on with tensortap top or tap.open()."""
    from tensortap.console import live

    server = live.start(host, port, memory)
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    print(f"tensortap: {live.greeting(server)}", flush=True)
    print("tensortap: Ctrl-C ends it", file=sys.stderr)
    while not done.wait(0.5):
        if not server.alive:
            print("tensortap: the session ended with an error", file=sys.stderr)
            raise typer.Exit(1)
    server.close()
    held = server.history
    print(f"tensortap: {held.written:,} records received", file=sys.stderr)
