"""Who may use the page: a token becomes a cookie, and pages of other sites get nothing.

Every request and the WebSocket pass three checks. The *Host* header must name this machine, which
stops DNS rebinding: a foreign page whose name was pointed here has another name. The *Origin*
header, if a browser sends one, must be this page. The cookie must be the one that the token was
exchanged for.
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

_PUBLIC = ("/enter.js",)  # needed before the cookie is set
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
    "<script src=/enter.js></script><noscript><a href=/>Open the page</a></noscript>"
)
_UNAUTHORIZED = (
    "Open the address that tensortap printed when it started, including its token, once in this "
    "browser."
)


class AccessControl:
    """The token, the cookie that it is exchanged for, and the host names of this server."""

    def __init__(self, host: str, port: int, names: Iterable[str] = ()) -> None:
        self.token = secrets.token_urlsafe(24)
        self.cookie = f"tensortap_{port}"  # cookies ignore ports: two pages must not share one
        self._secret = secrets.token_urlsafe(32)
        self._is_remote = not is_loopback(host)
        self._names = {"localhost", host.lower(), *(name.lower() for name in names)}
        if self._is_remote:
            own = socket.gethostname().lower()
            self._names |= {own, own.partition(".")[0], f"{own}.local"}

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

    def accepts_origin(self, origin: str | None, host: str) -> bool:
        """Return whether a request comes from this page, or from no page at all."""
        if origin is None:
            return True
        parts = urlsplit(origin)
        return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()

    def accepts_cookie(self, cookie: str | None) -> bool:
        """Return whether the cookies of a request contain ours."""
        try:
            ours = SimpleCookie(cookie or "").get(self.cookie)
        except CookieError:
            return False
        return ours is not None and hmac.compare_digest(ours.value.encode(), self._secret.encode())

    def exchange_token(self, path: str, query: bytes, headers: Headers) -> Response | None:
        """Return the response to a request that has a token; None if it has none."""
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
        tokens = [value for key, value in pairs if key == "token"]
        if not tokens:
            return None
        if not any(hmac.compare_digest(token.encode(), self.token.encode()) for token in tokens):
            return PlainTextResponse(f"The token is wrong. {_UNAUTHORIZED}", 401)
        rest = urlencode([pair for pair in pairs if pair[0] != "token"])
        response: Response
        if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
            response = RedirectResponse(f"{path}?{rest}" if rest else path, 303)
        else:
            # a redirect that began on another site would not carry a strict cookie
            response = HTMLResponse(_ENTER)
        response.set_cookie(self.cookie, self._secret, httponly=True, samesite="strict", path="/")
        return response

    def rejection(self, scope: Any, headers: Headers) -> Response | None:
        """Return the response to a request that must not reach the page; None lets it pass."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self.accepts_host(hosts[0]):
            return PlainTextResponse("This server does not answer under that host name.", 421)
        if not self.accepts_origin(headers.get("origin"), hosts[0]):
            return PlainTextResponse("Requests from other sites are rejected.", 403)
        if scope["type"] == "http" and scope["method"] == "GET":
            if scope["path"] in _PUBLIC:
                return None
            response = self.exchange_token(scope["path"], scope["query_string"], headers)
            if response is not None:
                return response
        if not self.accepts_cookie(headers.get("cookie")):
            return PlainTextResponse(_UNAUTHORIZED, 401)
        return None


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
            await app(scope, receive, _with_headers(send, headers.get("host", "")))
        elif rejection is None:
            await self._app(scope, receive, send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 4401, "reason": "not allowed"})


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


def is_loopback(host: str) -> bool:
    """Return whether no other machine can reach a host.

    >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
