"""A timeout for requests that do not arrive completely; uvicorn has none."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_TIMEOUT = 10.0
"""Seconds for the head and the body of a request to arrive."""


class TimedProtocol(H11Protocol):  # type: ignore[misc]
    """Closes a connection that has been in the middle of one request for too long."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._checked: object = self.cycle  # the request at the last check
        self.loop.call_later(REQUEST_TIMEOUT, self._check)

    def _check(self) -> None:
        # an upgraded connection belongs to the protocol of WebSockets
        if self.transport.is_closing() or self.transport.get_protocol() is not self:
            return
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and self.cycle is self._checked:
            self.transport.abort()
            return
        self._checked = self.cycle
        self.loop.call_later(REQUEST_TIMEOUT, self._check)
