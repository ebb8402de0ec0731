"""The sockets of a server, and connections that have not completed the handshake.

CURVE proves that a client has the key before ZeroMQ delivers any message of it. Until then a
connection holds at most one frame, and libzmq closes it at a deadline.
"""

from __future__ import annotations

import collections
import contextlib
import resource
import socket
from collections.abc import Iterator
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from tensortap.core.buffers import MappedSegment
from tensortap.core.errors import TensortapError
from tensortap.live import keys
from tensortap.live import messages as wire
from tensortap.live.address import Address

HANDSHAKE_TIMEOUT = 15_000  # milliseconds
_MOST_PENDING = 2048  # connections, as of a large job that starts; of more, the oldest is closed
_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_ACCEPT_FAILED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def bind_router(
    context: zmq.Context[Any], address: Address, key: bytes
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Return the socket that listens on an address, and those that serve it.

    One reports its connections; on the other ZeroMQ asks which CURVE keys to accept.
    """
    zap: zmq.Socket[bytes] = context.socket(zmq.REP)
    zap.linger = 0
    zap.bind("inproc://zeromq.zap.01")
    router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    router.linger = 0
    router.rcvhwm = 0  # credits bound what is in flight
    router.sndhwm = 0
    router.rcvbuf = 1 << 20
    router.backlog = 1024
    router.router_mandatory = True
    router.maxmsgsize = wire.LARGEST_FRAME
    router.ipv6 = ":" in address.host
    router.handshake_ivl = HANDSHAKE_TIMEOUT
    router.set(zmq.HEARTBEAT_IVL, 3000)
    router.set(zmq.HEARTBEAT_TIMEOUT, 15000)
    router.curve_server = True
    router.zap_domain = b"tensortap"
    router.curve_publickey, router.curve_secretkey = keys.curve_pair(key, "server")
    monitor = router.get_monitor_socket(_EVENTS)
    try:
        router.bind(address.endpoint)
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        raise TensortapError(f"cannot listen on {address}: {error}") from None
    return router, monitor, zap


def answer_zap(zap: zmq.Socket[bytes], client_key: bytes) -> None:
    """Tell ZeroMQ to accept only this CURVE key."""
    while zap.poll(0):
        frames = zap.recv_multipart()
        sequence = frames[1] if len(frames) > 1 else b""
        curve = len(frames) == 7 and frames[5] == b"CURVE" and len(frames[6]) == 32
        accepted = curve and z85.encode(frames[6]) == client_key
        status = (b"200", b"OK", b"client") if accepted else (b"400", b"unknown key", b"")
        zap.send_multipart([b"1.0", sequence, *status, b""])


def source_fd(frame: zmq.Frame) -> int:
    """Return the file descriptor of the connection that a frame came over, or -1."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def read_nonce(arena: wire.Arena) -> bytes | None:
    """Return the nonce in a client's arena; None if this host has no such segment."""
    try:
        return bytes(MappedSegment(arena.pid, arena.fd, 4096).memory[:16])
    except (OSError, ValueError, OverflowError):
        return None


class PendingSockets:
    """TCP connections whose clients have not said hello."""

    def __init__(self, rejected: collections.Counter[str]) -> None:
        self._rejected = rejected
        self._sockets: dict[int, None] = {}  # by file descriptor, oldest first

    def __len__(self) -> int:
        return len(self._sockets)

    def read(self, monitor: zmq.Socket[bytes]) -> Iterator[int]:
        """Note new and failed connections; yield the descriptors of closed ones."""
        full = False
        for _ in range(1000):
            if not monitor.poll(0):
                break
            message = recv_monitor_message(monitor)
            event, fd = message["event"], message["value"]
            if event == zmq.EVENT_ACCEPTED:
                self.done(fd)
                self._sockets[fd] = None
            elif event == zmq.EVENT_DISCONNECTED:
                self.done(fd)
                yield fd
            elif event == zmq.EVENT_ACCEPT_FAILED:
                full = True  # reported again and again, faster than it is read: make room once
            elif (
                event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
                or fd == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
            ):
                self._rejected["wrong key"] += 1
            else:
                self._rejected["failed handshake"] += 1
        # training needs file descriptors as well
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _MOST_PENDING if descriptors < 0 else min(_MOST_PENDING, descriptors // 2)
        if full:  # no descriptor is left
            most = min(most, len(self._sockets) // 2)
        while len(self._sockets) > most:
            self._close(next(iter(self._sockets)))

    def done(self, fd: int) -> None:
        """Forget a connection that was closed, or has completed the handshake."""
        self._sockets.pop(fd, None)

    def _close(self, fd: int) -> None:
        self.done(fd)
        self._rejected["too many connections"] += 1
        connection = socket.socket(fileno=fd)  # not duplicated: there may be no descriptor left
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.detach()
