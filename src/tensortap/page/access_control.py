"""Control access to the page: a token opens it once, and later requests need two secrets.

Every request and the WebSocket pass these checks. The *Host* header must name this machine, which
stops DNS rebinding: a foreign page whose name was pointed here has another name. The *Origin*
header, if a browser sends one, must be this page. A *cookie* and a *key* must be those that a
token was exchanged for, and each token is exchanged only once.

Browsers send cookies to all ports of a host, so a server of another user on another port can learn
the cookie. It cannot learn the key: the page keeps it in its origin, to which the port belongs,
and sends it in a header, or for the WebSocket as a subprotocol. Downloads and frames cannot have
headers; their addresses are signed.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

from tensortap.live.address import Address

KEY_HEADER = "x-tensortap-key"
SUBPROTOCOL = "tensortap"
_SIGNATURE = "&signature="
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self' {socket}; font-src 'self'; frame-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
_ENTER = (
    "<!doctype html><meta charset=utf-8><title>tensortap</title>"
    '<script src=/enter.js data-key="{key}"></script>'
    "<noscript>This page needs JavaScript.</noscript>"
)
_UNAUTHORIZED = (
    "Open the address that tensortap printed, including its token. An address works once, in one "
    "browser: tap.view() and tensortap view print the next one."
)


class AccessControl:
    """The tokens, the cookie and the key that they open, and the host names of this server."""

    def __init__(self, host: str, port: int, names: Iterable[str] = ()) -> None:
        # a name that servers on other ports cannot guess, and so cannot overwrite
        self.cookie = f"tensortap_{port}_{secrets.token_hex(8)}"
        self._cookie_value, self._key = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._tokens: dict[str, None] = {}  # the oldest first
        self._is_remote = not Address(host, port).loopback
        self._names = {"localhost", host.lower(), *(name.lower() for name in names)}
        if self._is_remote:
            own = socket.gethostname().lower()
            self._names |= {own, own.partition(".")[0], f"{own}.local"}

    def new_token(self) -> str:
        """Return a token that opens the page once."""
        token = secrets.token_urlsafe(24)
        self._tokens[token] = None
        if len(self._tokens) > 64:  # of those that were never used, the oldest expires
            del self._tokens[next(iter(self._tokens))]
        return token

    def is_unused(self, token: str) -> bool:
        """Return whether a token still opens the page."""
        return token in self._tokens

    def accepts_host(self, header: str) -> bool:
        """Return whether a Host header names this machine; the port may be that of a tunnel.

        >>> access = AccessControl("127.0.0.1", 2876)
        >>> hosts = ("localhost:9000", "[::1]:2876", "evil.example:2876", "")
        >>> [access.accepts_host(host) for host in hosts]
        [True, True, False, False]
        """
        host = _host_of(header)
        if host is None:
            return False
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return host in self._names
        # an address cannot be rebound, only a name
        return address.is_loopback or self._is_remote or host in self._names

    def _accepts_cookie(self, cookie: str | None) -> bool:
        try:
            ours = SimpleCookie(cookie or "").get(self.cookie)
        except CookieError:
            return False
        return ours is not None and _equal(ours.value, self._cookie_value)

    def _accepts_key(self, scope: Any, headers: Headers) -> bool:
        """Return whether a request has the key, or an address that the server has signed."""
        if scope["type"] == "websocket":
            return any(_equal(each, self._key) for each in scope["subprotocols"])
        if _equal(headers.get(KEY_HEADER, ""), self._key):
            return True
        query, found, signature = scope["query_string"].decode("latin-1").rpartition(_SIGNATURE)
        address = f"{scope['path']}?{query}"
        return bool(found) and _equal(signature, self._signature(address))

    def signed(self, path: str, **parameters: object) -> str:
        """Return an address that needs no key, for downloads and frames."""
        address = f"{path}?{urlencode(parameters)}"
        return f"{address}{_SIGNATURE}{self._signature(address)}"

    def _signature(self, address: str) -> str:
        return hmac.new(self._key.encode(), address.encode(), hashlib.sha256).hexdigest()

    def _exchange(self, token: str) -> Response | None:
        """Return a page that keeps the key and opens the page; None if the token is not valid."""
        # the tokens are random and compared by hash: time tells nothing about them
        if token not in self._tokens:
            return None
        del self._tokens[token]
        # no redirect: one that began on another site, or in a file, lacks a strict cookie
        response = HTMLResponse(_ENTER.format(key=self._key))
        response.set_cookie(
            self.cookie, self._cookie_value, httponly=True, samesite="strict", path="/"
        )
        return response

    def foreign(self, headers: Headers) -> Response | None:
        """Return the response to a request under another name, or from a page of another site."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self.accepts_host(hosts[0]):
            return PlainTextResponse("This server does not answer under that host name.", 421)
        # pages of other sites have their own origin; a request outside of any page has none
        origin = urlsplit(headers.get("origin", f"http://{hosts[0]}"))
        if origin.scheme not in ("http", "https") or origin.netloc.lower() != hosts[0].lower():
            return PlainTextResponse("Requests from other sites are rejected.", 403)
        return None

    def rejection(self, scope: Any, headers: Headers) -> Response | None:
        """Return the response to a request that must not reach the page; None lets it pass."""
        if (foreign := self.foreign(headers)) is not None:
            return foreign
        path, is_page = scope["path"], scope["type"] == "http" and scope["method"] == "GET"
        if is_page and path == "/enter.js":  # needed before the cookie is set
            return None
        has_cookie = self._accepts_cookie(headers.get("cookie"))
        tokens = parse_qs(scope["query_string"].decode("latin-1")).get("token")
        if is_page and path == "/" and tokens:
            response = self._exchange(tokens[0])
            if response is None and has_cookie:
                return RedirectResponse("/", 303)  # this browser has used it
            return response or PlainTextResponse(f"Not a valid token. {_UNAUTHORIZED}", 401)
        # the files of the page are the same for everybody
        is_data = scope["type"] == "websocket" or path.startswith("/api/")
        if has_cookie and (not is_data or self._accepts_key(scope, headers)):
            return None
        return PlainTextResponse(_UNAUTHORIZED, 401)


class AccessMiddleware:
    """Applies access control to an application, and adds security headers to its responses."""

    def __init__(self, app: Any, access: AccessControl) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        rejection = self._access.rejection(scope, headers)
        if scope["type"] == "http":
            app = rejection or self._app
            if rejection is not None:  # a stranger keeps no connection
                rejection.headers["connection"] = "close"
            await app(scope, receive, _with_headers(send, headers.get("host", "")))
        elif rejection is None:
            await self._app(scope, receive, send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 4401, "reason": "not allowed"})


def _equal(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())


def _with_headers(send: Any, host: str) -> Any:
    """Return a `send` that adds security headers, unless a response has its own."""
    # an invalid host only gets an error, and must not get into a header
    where = host if _host_of(host) else ""
    policy = _POLICY.format(socket=f"ws://{where} wss://{where}" if where else "")
    defaults = {**_HEADERS, "content-security-policy": policy}

    async def send_with_headers(message: Any) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message["headers"]}
            pairs = [(name.encode(), value.encode("latin-1")) for name, value in defaults.items()]
            added = [pair for pair in pairs if pair[0] not in present]
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return send_with_headers


def _host_of(header: str) -> str | None:
    """Return the host of a Host header in lower case; None if the header is invalid."""
    text = header.strip().lower()
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        valid = bool(closed) and (not rest or (rest[0] == ":" and rest[1:].isdigit()))
    else:
        host, colon, port = text.partition(":")
        valid = not colon or port.isdigit()
    plain = all(c.isalnum() or c in ".-_:" for c in host) and host.isascii()
    return host if valid and host and plain else None
