"""`tensortap serve`: keep a live session running."""

from __future__ import annotations

import contextlib
from pathlib import Path

import typer

from tensortap.cli.terminal import message, wait_for_interrupt


def serve(
    host: str = typer.Option("127.0.0.1", help="Address to listen on; encrypted beyond loopback."),
    port: int | None = typer.Option(None, help="Default: TENSORTAP_PORT, or 2875."),
    memory: str = typer.Option("50%", help="Bound of the history: 8GB, or a share of the memory."),
    save: Path | None = typer.Option(
        None, help="Also write what arrives into a run in this folder."
    ),
) -> None:
    """Listen for training programs until Ctrl-C; watch with tensortap top or tap.open()."""
    from tensortap.api import session as live

    saver = None
    if save is not None:
        from tensortap.live.saver import Saver

        saver = Saver(save)
    _raise_descriptor_limit()
    server = live.start(host, port, memory, keep=saver)
    print(f"tensortap: {live.greeting(server)}", flush=True)
    if saver is not None:
        print(f"tensortap: writing what arrives to {saver.path}", flush=True)
    wait_for_interrupt("the session", lambda: server.alive)
    server.close()
    if saver is not None:
        saver.close()
    message(f"received {server.history.written:,} records")


def _raise_descriptor_limit() -> None:
    """Allow as many connections as the system does: each takes a descriptor."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # there is none on Windows
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
