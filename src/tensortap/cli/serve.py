"""`tensortap serve`: a live session that stays up."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import typer


def serve(
    host: str = typer.Option("127.0.0.1", help="Where to listen; beyond this machine encrypted."),
    port: int | None = typer.Option(None, help="2875, or TENSORTAP_PORT."),
    memory: str = typer.Option("50%", help="How much to keep: 8GB, or a share of the memory."),
    save: Path | None = typer.Option(None, help="A folder: keep all that arrives as a run there."),
) -> None:
    """Listen for training programs until Ctrl-C; look on with tensortap top or tap.open()."""
    from tensortap.api import session as live

    saver = None
    if save is not None:
        from tensortap.api.save import Saver

        saver = Saver(save)
    server = live.start(host, port, memory, keep=saver)
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    print(f"tensortap: {live.greeting(server)}", flush=True)
    if saver is not None:
        print(f"tensortap: keeping all that arrives in {saver.path}", flush=True)
    print("tensortap: Ctrl-C ends it", file=sys.stderr)
    while not done.wait(0.5):
        if not server.alive:
            print("tensortap: the session ended with an error", file=sys.stderr)
            raise typer.Exit(1)
    server.close()
    if saver is not None:
        saver.close()
    held = server.history
    print(f"tensortap: {held.written:,} records received", file=sys.stderr)
