"""Bounds for connections without a complete request; uvicorn has none."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_TIMEOUT = 10.0
"""Seconds for the head and the body of a request to arrive."""
MOST_WAITING = 100
"""Connections that have not sent a request: each takes a file descriptor of this process."""


class TimedProtocol(H11Protocol):  # type: ignore[misc]
    """Closes a connection that has been in the middle of one request for too long.

    When too many wait for their first request, the oldest of them is closed.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._checked: object = self.cycle  # the request at the last check
        self.loop.call_later(REQUEST_TIMEOUT, self._check)
        self._made = self.loop.time()
        others = (each for each in self.connections if isinstance(each, TimedProtocol))
        waiting = [e for e in others if e.cycle is None and not e.transport.is_closing()]
        if len(waiting) > MOST_WAITING:
            min(waiting, key=lambda each: each._made).transport.abort()

    def _check(self) -> None:
        # an upgraded connection belongs to the protocol of WebSockets
        if self.transport.is_closing() or self.transport.get_protocol() is not self:
            return
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and self.cycle is self._checked:
            self.transport.abort()
            return
        self._checked = self.cycle
        self.loop.call_later(REQUEST_TIMEOUT, self._check)
