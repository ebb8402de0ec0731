"""Requests of the page, and JSON responses, which browsers cache by their version."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
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
from tensortap.page.catalog import CatalogEntry, RunEntry
from tensortap.page.encoding import typed

if TYPE_CHECKING:
    from tensortap.page.server import PageContext

log = logging.getLogger("tensortap")

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


class PageRoute(NamedTuple):
    """A request of the page: its name below ``/api/``, and the function that answers it.

    `handler` returns a response, or what becomes JSON. If `cached`, the version of the runs is
    the ETag of the response.
    """

    name: str
    handler: Callable[[PageRequest], Any]
    cached: bool = True
    method: str = "GET"

    def route(self) -> Route:
        """Return the route of the application, which runs the handler in a thread."""

        async def run(request: Request) -> Response:
            return await run_in_threadpool(self._respond, PageRequest(request))

        return Route(f"/api/{self.name}", run, methods=[self.method])

    def _respond(self, request: PageRequest) -> Response:
        """Return the response of the handler, or an error with a message for people."""
        try:
            return self._response(request)
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

    def _response(self, request: PageRequest) -> Response:
        headers = {}
        if self.cached:
            entries = request.entries()
            for entry in entries:
                entry.reader()  # an entry gets its version when it is opened
            tag = f'"{_BOOT}-{"-".join(str(entry.version) for entry in entries)}"'
            headers = {"etag": tag}
            if request.http.headers.get("if-none-match") == tag:
                return Response(status_code=304, headers=headers)
        answer = self.handler(request)
        if isinstance(answer, Response):
            return answer
        return Response(encode_json(answer), media_type="application/json", headers=headers)


def _error(message: str, status: int) -> Response:
    return Response(encode_json({"error": message}), status, media_type="application/json")


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
