"""The sockets of a server, and TCP connections that have not completed the handshake."""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import struct
import time
from typing import Any, NamedTuple

import zmq

from tensortap.errors import TensortapError
from tensortap.wire import keys
from tensortap.wire import messages as wire
from tensortap.wire.address import Address

HANDSHAKE_TIMEOUT = 10.0
_FAILED_HANDSHAKE = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_HANDSHAKE_NBYTES = 2 * wire.LARGEST_MESSAGE  # ZeroMQ would buffer a message without end
_REFUSAL_TIMEOUT = 1.0  # seconds for the refusal to arrive before the connection is closed
_ZAP_DOMAIN = b"tensortap"


def bind_router(
    context: zmq.Context[Any], address: Address, key: bytes
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Return the socket that listens on an address, and the one that reports its connections.

    Connections are encrypted unless the address is a loopback one.
    """
    router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    router.linger = 0
    router.rcvhwm = 0  # credits bound what is in flight
    router.sndhwm = 0
    router.rcvbuf = 1 << 20
    router.backlog = 1024
    router.router_mandatory = True
    router.maxmsgsize = wire.LARGEST_MESSAGE
    router.ipv6 = ":" in address.host
    router.set(zmq.HEARTBEAT_IVL, 3000)
    router.set(zmq.HEARTBEAT_TIMEOUT, 15000)
    if not address.loopback:
        router.curve_server = True
        router.zap_domain = _ZAP_DOMAIN
        router.curve_publickey, router.curve_secretkey = keys.curve_pair(key, "server")
    monitor = router.get_monitor_socket(
        zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _FAILED_HANDSHAKE
    )
    try:
        router.bind(address.endpoint)
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        raise TensortapError(f"cannot listen on {address}: {error}") from None
    return router, monitor


def source_fd(frame: zmq.Frame) -> int:
    """Return the file descriptor of the connection that a frame came over, or -1."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


class PendingSocket(NamedTuple):
    """A TCP connection whose client has not proven that it has the key, or was rejected."""

    deadline: float
    rejected: bool = False


class PendingSockets:
    """TCP connections that are closed at their deadline, or when they have sent too much."""

    def __init__(self, rejected: collections.Counter[str]) -> None:
        self._rejected = rejected
        self._sockets: dict[int, PendingSocket] = {}  # by file descriptor

    def __len__(self) -> int:
        return len(self._sockets)

    def opened(self, fd: int) -> None:
        """Start the handshake timeout of a new connection."""
        self._sockets[fd] = PendingSocket(time.monotonic() + HANDSHAKE_TIMEOUT)

    def done(self, fd: int) -> None:
        """Forget a connection that was closed, or has completed the handshake."""
        self._sockets.pop(fd, None)

    def reject(self, fd: int) -> bool:
        """Close a connection soon; return whether its client is to be told why.

        It is told once: unread answers would pile up in memory.
        """
        before = self._sockets.get(fd)
        if before is not None and before.rejected:
            return False
        self._sockets[fd] = PendingSocket(time.monotonic() + _REFUSAL_TIMEOUT, rejected=True)
        return True

    def close_expired(self) -> None:
        """Close connections that have timed out or have sent too many bytes."""
        now = time.monotonic()
        for fd, pending in list(self._sockets.items()):
            if now > pending.deadline or _received_nbytes(fd) > _HANDSHAKE_NBYTES:
                del self._sockets[fd]
                if not pending.rejected:
                    self._rejected["handshake timeout"] += 1
                _shut_down(fd)


def _received_nbytes(fd: int) -> int:
    """Return how many bytes have arrived over a connection; 0 where the system does not tell."""
    with contextlib.suppress(OSError, AttributeError, struct.error):
        with socket.socket(fileno=os.dup(fd)) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        received: int = struct.unpack_from("=Q", info, 128)[0]  # Linux: tcpi_bytes_received
        return received
    return 0


def _shut_down(fd: int) -> None:
    """End a connection; ZeroMQ then closes its socket."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        connection.shutdown(socket.SHUT_RDWR)
