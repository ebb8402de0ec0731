"""`tensortap compact`: sort a large run, so that pages and comparisons read little of it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import typer

from tensortap.cli.terminal import json_option, message, print_json, progress_bar
from tensortap.core.errors import MissingExtra, TensortapError


@contextlib.contextmanager
def dask_executor(address: str) -> Iterator[Any]:
    """Yield the executor of a Dask cluster, for the option ``--dask``."""
    try:
        from distributed import Client
    except ImportError:
        raise MissingExtra.of("--dask needs Dask", "scale") from None
    try:
        # a client that cannot connect may wait for itself for ever when it is collected
        where = urlsplit(address)
        socket.create_connection((where.hostname, where.port or 8786), 10).close()
        client = Client(address, timeout=10)
    except (OSError, ValueError) as error:
        raise TensortapError(f"--dask: cannot connect to {address}: {error}") from None
    with client:
        yield client.get_executor()


def compact(
    run: str = typer.Argument(..., help="Folder or URL of a run."),
    dask: str | None = typer.Option(
        None, metavar="tcp://host:8786", help="Use the workers of a Dask cluster."
    ),
    as_json: bool = json_option("windows"),
) -> None:
    """Sort a large run by tensors; what was compacted before stays, and so do its files."""
    from tensortap.rooms.compact.compact import compact_run
    from tensortap.runs.run_reader import RunReader

    with contextlib.ExitStack() as stack:
        executor = None if dask is None else stack.enter_context(dask_executor(dask))
        progress = stack.enter_context(progress_bar("compacting"))
        windows = compact_run(RunReader(run), executor, progress)
    if as_json:
        print_json({"windows": windows})
    message(f"wrote {windows:,} windows" if windows else "nothing to compact")
