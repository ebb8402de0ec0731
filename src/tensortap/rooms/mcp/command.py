"""`tensortap mcp`: let agents and other programs ask about runs and live sessions."""

from __future__ import annotations

import contextlib

import typer

from tensortap.core.errors import MissingExtra


def mcp(
    what: list[str] = typer.Argument(
        None, help="Runs, folders of runs, live sessions as host:port. Default: the folder runs."
    ),
    http: bool = typer.Option(False, "--http", help="Listen on 127.0.0.1, instead of stdin."),
    port: int | None = typer.Option(None, help="With --http. Default: the next free port."),
    allow_control: bool = typer.Option(
        False, "--allow-control", help="Also let clients switch probes of running jobs."
    ),
) -> None:
    """Serve the Model Context Protocol; a live session on this machine is found by itself."""
    try:
        from tensortap.rooms.mcp.server import create_server, http_server
        from tensortap.rooms.mcp.tools import Tools
    except ImportError as error:
        raise MissingExtra.of(f"tensortap mcp needs {error.name}", "mcp") from None
    with contextlib.closing(Tools(what or [])) as tools:
        server = create_server(tools, allow_control=allow_control)
        if not http:
            server.run()
            return
        address, token, serve = http_server(server, port)
        print(f"tensortap: the server is on {address}", flush=True)
        print(f"tensortap: clients send the header Authorization: Bearer {token}", flush=True)
        serve()
