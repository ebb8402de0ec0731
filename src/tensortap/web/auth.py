"""Who may look: the token becomes a cookie, and strangers' pages get nothing.

Three checks, of every request and of the WebSocket. The *Host* must name this machine: a page of a
stranger whose name was pointed here (DNS rebinding) has another one. The *Origin*, where a browser
says one, must be this page itself. And the cookie must be the one that the token was exchanged for.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

_OPEN = ("/enter.js",)  # what the door itself needs
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self' {socket}; font-src 'self'; frame-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_ENTER = (
    "<!doctype html><meta charset=utf-8><title>tensortap</title>"
    "<script src=/enter.js></script><noscript><a href=/>Open the page</a></noscript>"
)
LOCKED = (
    "This page needs the address that tensortap printed when it started, with its token: open that "
    "address once in this browser."
)


class Door:
    """The token, the cookie that it is exchanged for, and the names this server goes by."""

    def __init__(self, host: str, port: int, names: Iterable[str] = ()) -> None:
        self.token = secrets.token_urlsafe(24)
        self.cookie = f"tensortap_{port}"  # cookies know no ports: two pages must not share one
        self._secret = secrets.token_urlsafe(32)
        self._anywhere = not is_loopback(host)
        self._names = {"localhost", host.lower(), *(name.lower() for name in names)}
        if self._anywhere:
            own = socket.gethostname().lower()
            self._names |= {own, own.partition(".")[0], f"{own}.local"}

    def knows_host(self, header: str) -> bool:
        """Whether a Host header names this machine; the port may be a tunnel's.

        >>> door = Door("127.0.0.1", 2876)
        >>> [door.knows_host(h) for h in ("localhost:9000", "[::1]:2876", "evil.example:2876", "")]
        [True, True, False, False]
        """
        host = _host_of(header)
        if host is None:
            return False
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return host in self._names
        # rebinding needs a name: an address cannot be pointed elsewhere
        return address.is_loopback or self._anywhere or host in self._names

    def knows_origin(self, origin: str | None, host: str) -> bool:
        """Whether a request comes from this page, or from no page at all."""
        if origin is None:
            return True
        parts = urlsplit(origin)
        return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()

    def lets_in(self, cookie: str | None) -> bool:
        """Whether the cookies of a request hold the one that was given."""
        try:
            held = SimpleCookie(cookie or "").get(self.cookie)
        except CookieError:
            return False
        return held is not None and hmac.compare_digest(held.value.encode(), self._secret.encode())

    def enter(self, path: str, query: bytes, headers: Headers) -> Response | None:
        """The answer to a request that brings the token; None if it brings none."""
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
        said = [value for key, value in pairs if key == "token"]
        if not said:
            return None
        if not any(hmac.compare_digest(word.encode(), self.token.encode()) for word in said):
            return PlainTextResponse(f"That token is not the one of this server. {LOCKED}", 401)
        rest = urlencode([pair for pair in pairs if pair[0] != "token"])
        response: Response
        if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
            response = RedirectResponse(f"{path}?{rest}" if rest else path, 303)
        else:
            # followed from another site: a redirect would not carry a strict cookie
            response = HTMLResponse(_ENTER)
        response.set_cookie(self.cookie, self._secret, httponly=True, samesite="strict", path="/")
        return response


class Guarded:
    """An application behind a door."""

    def __init__(self, app: Any, door: Door) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if scope["type"] == "websocket":
            if refusal is not None:
                await receive()
                await send({"type": "websocket.close", "code": 4401, "reason": "not allowed"})
                return
            await self._app(scope, receive, send)
            return
        answer = self._app if refusal is None else refusal
        await answer(scope, receive, _with_headers(send, headers.get("host", "")))

    def _refusal(self, scope: Any, headers: Headers) -> Response | None:
        door = self._door
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not door.knows_host(hosts[0]):
            said = "This server answers only to the name it was opened under."
            return PlainTextResponse(said, 421)
        if not door.knows_origin(headers.get("origin"), hosts[0]):
            return PlainTextResponse("Another site asked for this: refused.", 403)
        if scope["type"] == "http" and scope["method"] == "GET":
            if scope["path"] in _OPEN:
                return None
            entered = door.enter(scope["path"], scope["query_string"], headers)
            if entered is not None:
                return entered
        if not door.lets_in(headers.get("cookie")):
            return PlainTextResponse(LOCKED, 401)
        return None


def _with_headers(send: Any, host: str) -> Any:
    """Answers that no other page can use, and that no browser guesses about."""
    # only hosts that were checked get an answer with content; others must not end the header
    where = host if _host_of(host) else ""
    policy = _POLICY.format(socket=f"ws://{where} wss://{where}" if where else "").encode("latin-1")

    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            said = {name.lower() for name, _ in message["headers"]}
            added = [
                (b"x-content-type-options", b"nosniff"),
                (b"referrer-policy", b"no-referrer"),
                (b"cross-origin-resource-policy", b"same-origin"),
                (b"cross-origin-opener-policy", b"same-origin"),
            ]
            if b"content-security-policy" not in said:
                added.append((b"content-security-policy", policy))
            if b"cache-control" not in said:
                added.append((b"cache-control", b"no-store"))
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return sending


def _host_of(header: str) -> str | None:
    """The host in a Host header, in small letters; None if it is none."""
    text = header.strip().lower()
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        good = bool(closed) and (not rest or (rest[0] == ":" and rest[1:].isdigit()))
    else:
        host, colon, port = text.partition(":")
        good = not colon or port.isdigit()
    plain = all(c.isalnum() or c in ".-_:" for c in host) and host.isascii()
    return host if good and host and plain else None


def is_loopback(host: str) -> bool:
    """Whether nobody on another machine can reach it.

    >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
