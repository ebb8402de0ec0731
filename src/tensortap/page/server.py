"""The web server of the page: an application over a catalog, in a thread, on its own port."""

from __future__ import annotations

import asyncio
import atexit
import errno
import functools
import gzip
import html
import importlib.resources
import importlib.util
import logging
import socket
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from uvicorn.protocols.http.h11_impl import H11Protocol

from tensortap.core.errors import MissingExtra, TensortapError
from tensortap.core.rooms import Room, Tab, folder_of, load, rooms
from tensortap.page import routes
from tensortap.page.access_control import AccessControl, AccessMiddleware
from tensortap.page.catalog import Catalog
from tensortap.page.jobs import Jobs
from tensortap.page.push import Push
from tensortap.page.responses import PageRoute

log = logging.getLogger("tensortap")

PORT = 2876
_PORTS_TRIED = 20
_REQUEST_TIMEOUT = 10.0  # seconds for the head and the body of a request to arrive
_MOST_WAITING = 100  # connections without a request: each takes a descriptor of this process
_MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_REDIRECT = (
    '<!doctype html><meta charset=utf-8><meta http-equiv=refresh content="0;url={url}">'
    '<title>tensortap</title><a href="{url}">Open the page</a>'
)
_TABS = (
    Tab("tabs/summary.js", 0), Tab("tabs/alerts.js", 50), Tab("tabs/receipt.js", 90),
)  # fmt: skip


class PageContext:
    """State that all routes share."""

    def __init__(self, catalog: Catalog, access: AccessControl) -> None:
        self.catalog = catalog
        self.access = access
        self.push = Push(catalog)
        self.jobs = Jobs(self.push.report_job)


def application(catalog: Catalog, access: AccessControl) -> Any:
    """Return the page over a catalog, behind access control."""
    context = PageContext(catalog, access)

    async def push(websocket: WebSocket) -> None:
        await context.push.serve(websocket)

    app = Starlette(
        routes=[
            Route("/", _index),
            Route("/enter.js", _static),
            Route("/static/{path:path}", _static),
            Route("/rooms/{room}/{path:path}", _static),
            Route("/plotly.js", _plotly),
            WebSocketRoute("/push", push),
            *(each.route() for each in routes.ROUTES),
            *(each.route() for room in rooms().values() for each in _routes_of(room)),
        ]
    )
    app.state.context = context
    return AccessMiddleware(app, access)


def _routes_of(room: Room) -> Iterable[PageRoute]:
    try:
        return load(room.routes) if room.routes is not None else ()
    except ImportError as error:  # a library that this room needs is not installed
        log.warning("tensortap: the page has no %s: %s", room.name, error)
        return ()


def _tabs() -> list[str]:
    """Return the addresses of the modules of all tabs, in their order."""
    found = [(tab.order, f"/static/{tab.file}") for tab in _TABS]
    for room in rooms().values():
        found += [(tab.order, f"/rooms/{room.name}/{tab.file}") for tab in room.tabs]
    return [address for _, address in sorted(found)]


def _index(request: Request) -> Response:
    page = (_static_folder(None) / "index.html").read_text(encoding="utf-8")
    # the address changes when plotly is upgraded, so that browsers may cache it forever
    stat = plotly_script().stat()
    page = page.replace("/plotly.js", f"/plotly.js?v={stat.st_size:x}-{int(stat.st_mtime):x}", 1)
    # all modules at once: a browser would find them one after the other
    files = sorted(path.name for path in _static_folder(None).glob("*.js"))
    shared = (f"/static/{name}" for name in files if name != "enter.js")
    links = [f'<link rel="modulepreload" href="{each}">' for each in shared]
    later = 'rel="modulepreload" fetchpriority="low" class="tab"'
    links += [f'<link {later} href="{each}">' for each in _tabs()]
    page = page.replace("<!-- modules -->", "\n".join(links))
    return HTMLResponse(page, headers={"cache-control": "no-cache"})


def _static(request: Request) -> Response:
    folder = _static_folder(request.path_params.get("room"))
    path = (folder / request.path_params.get("path", "enter.js")).resolve()
    media = _MEDIA_TYPES.get(path.suffix)
    if media is None or not path.is_relative_to(folder) or not path.is_file():
        return PlainTextResponse("There is no such file.", 404)
    # browsers ask again each time, so that an upgrade takes effect
    return _file(request, path, media, "no-cache")


def _file(request: Request, path: Path, media: str, cache: str) -> Response:
    """Return a file, compressed if the browser accepts that; 304 if its copy is current."""
    changed = path.stat().st_mtime_ns
    headers = {"cache-control": cache, "etag": f'"{changed:x}"', "vary": "accept-encoding"}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    content = _compressed(path, changed)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
    else:
        content = gzip.decompress(content)
    return Response(content, media_type=f"{media}; charset=utf-8", headers=headers)


@functools.lru_cache(maxsize=64)
def _compressed(path: Path, changed: int) -> bytes:
    return gzip.compress(path.read_bytes(), 6)


@functools.lru_cache(maxsize=64)  # finding a package takes longer than all the rest
def _static_folder(room: str | None) -> Path:
    package = "tensortap.page" if room not in rooms() else folder_of(str(room))
    return Path(str(importlib.resources.files(package) / "static")).resolve()


def _plotly(request: Request) -> Response:
    cache = "private, max-age=31536000, immutable"
    return _file(request, plotly_script(), "text/javascript", cache)


def plotly_script() -> Path:
    """Return the JavaScript file of the installed plotly."""
    spec = importlib.util.find_spec("plotly")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "package_data" / "plotly.min.js"
        if path.is_file():
            return path
    raise MissingExtra.of("the page needs plotly", "view")


def listen(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens on a port, or without one on the next free port."""
    first = PORT if port is None else port
    ports = range(first, first + _PORTS_TRIED) if port is None else [first]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
            listener.listen(128)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                reason = f"cannot listen on {host}:{number}: {error.strerror}"
                raise TensortapError(reason) from None
        except OverflowError:
            listener.close()
            raise TensortapError(f"port must be a number from 0 to 65535, got {number}") from None
    if port is not None:
        raise TensortapError(f"port {port} is in use: omit --port to take the next free one")
    raise TensortapError(f"ports {first} to {ports[-1]} are all in use: choose another one")


class TimedProtocol(H11Protocol):  # type: ignore[misc]
    """Closes a connection that has been in the middle of one request for too long.

    When too many wait for their first request, the oldest of them is closed. uvicorn has no such
    limits.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._checked: object = self.cycle  # the request at the last check
        self.loop.call_later(_REQUEST_TIMEOUT, self._check)
        self._made = self.loop.time()
        others = (each for each in self.connections if isinstance(each, TimedProtocol))
        waiting = [e for e in others if e.cycle is None and not e.transport.is_closing()]
        if len(waiting) > _MOST_WAITING:
            min(waiting, key=lambda each: each._made).transport.abort()

    def _check(self) -> None:
        # an upgraded connection belongs to the protocol of WebSockets
        if self.transport.is_closing() or self.transport.get_protocol() is not self:
            return
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and self.cycle is self._checked:
            self.transport.abort()
            return
        self._checked = self.cycle
        self.loop.call_later(_REQUEST_TIMEOUT, self._check)


class Page:
    """The page, served from this process until `close`; open `url` in a browser."""

    def __init__(
        self,
        catalog: Catalog,
        host: str = "127.0.0.1",
        port: int | None = None,
        names: Iterable[str] = (),
    ) -> None:
        plotly_script()  # raises here rather than in the browser
        self.catalog = catalog
        self.host = "127.0.0.1" if host == "localhost" else host.strip("[]")
        self._socket = listen(self.host, port)
        self.port: int = self._socket.getsockname()[1]
        self.access = AccessControl(self.host, self.port, names)
        self._files: list[Path] = []
        atexit.register(self._delete_files)
        config = uvicorn.Config(
            application(catalog, self.access), log_config=None, log_level="warning",
            access_log=False, lifespan="off", ws="websockets-sansio", ws_max_size=1 << 16,
            server_header=False, proxy_headers=False, timeout_graceful_shutdown=1, loop="asyncio",
            http=TimedProtocol,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="tensortap-page", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 30
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise TensortapError("the page did not start; the log says why")
            time.sleep(0.005)

    def _run(self) -> None:
        try:
            self._server.run([self._socket])
        except Exception:
            log.exception("tensortap: the page stopped with an error")

    @property
    def alive(self) -> bool:
        """Whether the page is being served."""
        return self._thread.is_alive() and not self._server.should_exit

    @property
    def address(self) -> str:
        """The address without the token."""
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    @property
    def url(self) -> str:
        """A new address with a token, which opens the page once, in one browser."""
        return f"{self.address}?token={self.access.new_token()}"

    def __repr__(self) -> str:
        return f"<page at {self.address}>" if self.alive else "<page, closed>"

    def redirect_file(self, fragment: str = "") -> Path:
        """Write a file that only this user can read, and that leads a browser to the page.

        A browser gets the path of the file: every user can see its command line, and a token in
        it. The file is deleted when the page is closed or the program ends.
        """
        url = html.escape(self.url + fragment)
        number, name = tempfile.mkstemp(prefix="tensortap-", suffix=".html")  # with mode 0600
        with open(number, "w", encoding="utf-8") as file:
            file.write(_REDIRECT.format(url=url))
        self._files.append(Path(name))
        return Path(name)

    def _delete_files(self) -> None:
        while self._files:
            self._files.pop().unlink(missing_ok=True)

    def abandon(self) -> None:
        """Release the port in a forked child; the parent keeps serving."""
        atexit.unregister(self._delete_files)
        self._socket.close()

    def close(self) -> None:
        """Stop serving; runs and live sessions are not affected."""
        self._delete_files()
        atexit.unregister(self._delete_files)
        self._server.should_exit = True
        self._thread.join(10)
        self.catalog.close()
