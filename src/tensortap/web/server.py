"""The web server: an application over a library, on a port of its own, in a thread."""

from __future__ import annotations

import errno
import importlib.resources
import logging
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from tensortap.errors import MissingExtra, TensortapError
from tensortap.web.auth import Door, Guarded
from tensortap.web.catalog import Library
from tensortap.web.push import Push
from tensortap.web.responses import Memory
from tensortap.web.routes.all import routes

log = logging.getLogger("tensortap")

PORT = 2876
_TRIED = 20  # ports after it, if it is in use
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_STATIC = Path(str(importlib.resources.files("tensortap.web") / "static"))


class Place:
    """What the routes work with."""

    def __init__(self, library: Library) -> None:
        from tensortap.web.jobs import Jobs

        self.library = library
        self.memory = Memory()
        self.push = Push(library)
        self.jobs = Jobs(self.push.job)


def application(library: Library, door: Door) -> Any:
    """The page over a library, behind a door."""
    place = Place(library)

    async def push(websocket: WebSocket) -> None:
        await place.push.talk(websocket)

    app = Starlette(
        routes=[
            Route("/", _index),
            Route("/enter.js", _static),
            Route("/static/{path:path}", _static),
            Route("/plotly.js", _plotly),
            WebSocketRoute("/push", push),
            *routes(),
        ]
    )
    app.state.place = place
    return Guarded(app, door)


def _index(request: Request) -> Response:
    stat = plotly_script().stat()
    page = (_STATIC / "index.html").read_text(encoding="utf-8")
    # an address that is another one after an upgrade of plotly: it may be kept for ever
    address = f"/plotly.js?v={stat.st_size:x}-{int(stat.st_mtime):x}"
    return HTMLResponse(
        page.replace("/plotly.js", address, 1), headers={"cache-control": "no-cache"}
    )


def _static(request: Request) -> Response:
    wanted = request.path_params.get("path", "enter.js")
    path = (_STATIC / wanted).resolve()
    media = _TYPES.get(path.suffix)
    if media is None or not path.is_relative_to(_STATIC.resolve()) or not path.is_file():
        return PlainTextResponse("There is no such file.", 404)
    # asked for again with every start of the page: an upgrade must be seen at once
    headers = {"cache-control": "no-cache"}
    return FileResponse(path, media_type=f"{media}; charset=utf-8", headers=headers)


def _plotly(request: Request) -> Response:
    headers = {"cache-control": "private, max-age=31536000, immutable"}
    media = "text/javascript; charset=utf-8"
    return FileResponse(plotly_script(), media_type=media, headers=headers)


def plotly_script() -> Path:
    """Where the installed plotly has its JavaScript."""
    import importlib.util

    spec = importlib.util.find_spec("plotly")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in places:
        path = Path(place) / "package_data" / "plotly.min.js"
        if path.is_file():
            return path
    raise MissingExtra("the page needs plotly: pip install 'tensortap[view]'")


def listen(host: str, port: int | None) -> socket.socket:
    """A socket on the port, or, if none was asked for, on the next that is free."""
    first = PORT if port is None else port
    tried = range(first, first + _TRIED) if port is None else [first]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in tried:
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, number))
            found.listen(128)
            return found
        except OSError as error:
            found.close()
            if error.errno == errno.EADDRINUSE:
                continue
            raise TensortapError(f"cannot listen on {host}:{number}: {error.strerror}") from None
        except OverflowError:
            found.close()
            raise TensortapError(f"not a port: {number}; it is a number up to 65535") from None
    if port is not None:
        raise TensortapError(f"port {port} is in use: leave --port out, and the next free is taken")
    raise TensortapError(f"ports {first} to {first + _TRIED - 1} are all in use: say another one")


class Page:
    """The page, served from this process until `close`; `url` is what to open."""

    def __init__(
        self,
        library: Library,
        host: str = "127.0.0.1",
        port: int | None = None,
        names: Iterable[str] = (),
    ) -> None:
        host = "127.0.0.1" if host == "localhost" else host.strip("[]")
        plotly_script()  # said now, not in the browser
        self.library = library
        self.host = host
        self._socket = listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.door = Door(host, self.port, names)
        app = application(library, self.door)
        config = uvicorn.Config(
            app, log_config=None, log_level="warning", access_log=False, lifespan="off",
            ws="websockets-sansio", ws_max_size=1 << 16, server_header=False, proxy_headers=False,
            timeout_graceful_shutdown=1, loop="asyncio",
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="tensortap-page", daemon=True)
        self._thread.start()
        end = time.monotonic() + 30
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                raise TensortapError("the page could not be started; the log says why")
            time.sleep(0.005)

    def _run(self) -> None:
        try:
            self._server.run([self._socket])
        except Exception:
            log.exception("tensortap: the page ended with an error")

    @property
    def alive(self) -> bool:
        """Whether it answers."""
        return self._thread.is_alive() and not self._server.should_exit

    @property
    def address(self) -> str:
        """Where it is, without the token."""
        host = self.host
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    @property
    def url(self) -> str:
        """What to open, with the token."""
        return f"{self.address}?token={self.door.token}"

    def __repr__(self) -> str:
        return f"<the page on {self.url}>" if self.alive else "<the page, closed>"

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it has ended; whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """In a forked child: let go of the port, which is the parent's."""
        self._socket.close()

    def close(self) -> None:
        """Stop serving; runs and live sessions are not touched."""
        self._server.should_exit = True
        self._thread.join(10)
        self.library.close()
