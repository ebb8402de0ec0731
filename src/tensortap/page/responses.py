"""Requests of the page, and JSON responses, cached as long as they are valid."""

from __future__ import annotations

import collections
import functools
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.patterns import TypedPattern
from tensortap.core.record import Kind
from tensortap.page.catalog_entries import CatalogEntry, RunEntry
from tensortap.page.encoding import typed

if TYPE_CHECKING:
    from tensortap.page.server import PageContext

log = logging.getLogger("tensortap")

_CACHE_BYTES = 64 << 20
_CACHEABLE_BYTES = 4 << 20
_BOOT = secrets.token_hex(6)  # versions count from one again when the server restarts


class PageRequest:
    """The parameters of a request, parsed; invalid ones raise TensortapError."""

    def __init__(self, request: Request) -> None:
        self.http = request
        self.context: PageContext = request.app.state.context
        self._query = request.query_params

    @property
    def entry(self) -> CatalogEntry:
        """The run or live session that is shown."""
        return self.context.catalog.get(self.text("run"))

    @property
    def other(self) -> CatalogEntry | None:
        """The run or live session to compare with."""
        return self.context.catalog.get(self.text("other")) if self.text("other") else None

    def entries(self) -> list[CatalogEntry]:
        """Return the one or two entries that the request is about."""
        return [self.entry] if self.other is None else [self.entry, self.other]

    def concerns_deleted_run(self) -> bool:
        """Return whether a run of the request has been deleted."""
        try:
            return any(isinstance(each, RunEntry) and each.deleted for each in self.entries())
        except TensortapError:
            return False  # there is no such run

    def text(self, name: str, default: str = "") -> str:
        return str(self._query.get(name, default))

    def texts(self, name: str) -> list[str]:
        return list(self._query.getlist(name))

    def integer(self, name: str) -> int | None:
        numbers = self.integers(name)
        return numbers[0] if numbers else None

    def integers(self, name: str) -> list[int]:
        """Return integers separated by commas."""
        try:
            return [int(word) for word in self.text(name).split(",") if word]
        except ValueError:
            raise TensortapError(
                f"{name} must be integers like 0,1,2, got {self.text(name)!r}"
            ) from None

    def pattern(self, name: str, *, ignore_case: bool = False) -> TypedPattern | None:
        """Return a regular expression over names; None if the parameter is empty."""
        text = self.text(name)
        return TypedPattern(text, ignore_case=ignore_case) if text else None

    @property
    def theme(self) -> str:
        return "dark" if self.text("theme") == "dark" else "light"

    @property
    def kind(self) -> Kind | None:
        try:
            return Kind(self.text("kind")) if self.text("kind") else None
        except ValueError:
            kinds = ", ".join(kind.value for kind in Kind)
            raise NotFound(f"no kind {self.text('kind')!r}; kinds are {kinds}") from None


class ResponseCache:
    """Response bodies by address and version; the least recently used are evicted."""

    def __init__(self) -> None:
        self._bodies: collections.OrderedDict[str, bytes] = collections.OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        with self._lock:
            if key in self._bodies:
                self._bodies.move_to_end(key)
            return self._bodies.get(key)

    def put(self, key: str, body: bytes) -> None:
        if len(body) > _CACHEABLE_BYTES:
            return
        with self._lock:
            self._nbytes += len(body) - len(self._bodies.pop(key, b""))
            self._bodies[key] = body
            while self._nbytes > _CACHE_BYTES:
                _, oldest = self._bodies.popitem(last=False)
                self._nbytes -= len(oldest)


Endpoint = Callable[[Request], Awaitable[Response]]


def endpoint(handler: Callable[[PageRequest], Response]) -> Endpoint:
    """Return an endpoint that runs a handler in a thread, and reports its errors as JSON."""

    async def run(request: Request) -> Response:
        return await run_in_threadpool(_respond, handler, PageRequest(request))

    return run


def json_endpoint(handler: Callable[[PageRequest], Any], *, cached: bool = True) -> Endpoint:
    """Return an endpoint that responds with JSON; if `cached`, with the version as its ETag."""

    def respond(request: PageRequest) -> Response:
        if not cached:
            return _json_response(handler(request))
        entries = request.entries()
        for entry in entries:
            entry.reader()  # an entry gets its version when it is opened
        tag = f'"{_BOOT}-{"-".join(str(entry.version) for entry in entries)}"'
        if request.http.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        key = f"{request.http.url.path}?{request.http.url.query} {tag}"
        body = request.context.cache.get(key)
        if body is None:
            body = encode_json(handler(request))
            request.context.cache.put(key, body)
        return Response(body, media_type="application/json", headers={"etag": tag})

    return endpoint(respond)


def _respond(handler: Callable[[PageRequest], Response], request: PageRequest) -> Response:
    """Return the response of a handler, or an error with a message for people."""
    try:
        return handler(request)
    except (TensortapError, OSError) as error:
        if request.concerns_deleted_run():
            return _error("the run was deleted while it was shown", 410)
        if not isinstance(error, TensortapError):
            return _error(f"the run cannot be read: {error}", 410)
        return _error(str(error), 404 if isinstance(error, NotFound) else 422)
    except ValueError as error:
        return _error(str(error), 422)
    except MemoryError:
        return _error("not enough memory on the server", 413)
    except Exception as error:
        log.exception("tensortap: a request of the page failed")
        return _error(f"internal error in tensortap: {type(error).__name__}: {error}", 500)


def _error(message: str, status: int) -> Response:
    return _json_response({"error": message}, status)


def _json_response(value: Any, status: int = 200) -> Response:
    return Response(encode_json(value), status, media_type="application/json")


class PageRoute(NamedTuple):
    """A request of the page: its name below ``/api/``, and the function that answers it.

    `handler` returns what becomes JSON, or with `raw` a response of its own.
    """

    name: str
    handler: Callable[[PageRequest], Any]
    cached: bool = True
    method: str = "GET"
    raw: bool = False

    def route(self) -> Route:
        """Return the route of the application."""
        answer = endpoint if self.raw else functools.partial(json_endpoint, cached=self.cached)
        return Route(f"/api/{self.name}", answer(self.handler), methods=[self.method])


def encode_json(value: Any) -> bytes:
    """Encode JSON for the page: arrays as in figures, NaN and Inf in lists as null."""
    return _encoder.encode(value)


def _encode_other(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return typed(value)
    if isinstance(value, np.generic):
        return value.item()
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


_encoder = msgspec.json.Encoder(enc_hook=_encode_other)
