"""The sockets of a server, and connections that have not completed the handshake.

CURVE proves that a client has the key before ZeroMQ delivers any message of it. Until then, and
until its hello, a connection may send only a few KiB and has a deadline. It never holds more than
one frame, even if nobody has looked at it yet: libzmq reads single commands of the handshake.
"""

from __future__ import annotations

import collections
import contextlib
import resource
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from tensortap.core.buffers import MappedSegment
from tensortap.core.errors import TensortapError
from tensortap.live import keys
from tensortap.live import messages as wire
from tensortap.live.address import Address

HANDSHAKE_TIMEOUT = 15.0
_LONGEST_ROUND = 0.5  # seconds; a server that takes longer was stopped or starved
_MOST_PENDING = 2048  # connections, as of a large job that starts; of more, the oldest is closed
_LARGEST_HANDSHAKE = 16 << 10  # bytes; CURVE and the hello take one or two
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


class PendingSocket(NamedTuple):
    """A TCP connection whose client has not said hello, or was rejected."""

    deadline: float
    rejected: bool = False


class PendingSockets:
    """TCP connections that are closed at their deadline, or when they have sent too much."""

    def __init__(self, rejected: collections.Counter[str]) -> None:
        self._rejected = rejected
        self._sockets: dict[int, PendingSocket] = {}  # by file descriptor, oldest first
        self._running = 0.0  # seconds that the server has run for them
        self._looked = time.monotonic()

    def __len__(self) -> int:
        return len(self._sockets)

    def _now(self) -> float:
        """Return the time of deadlines, which stands still while the server does not run.

        Otherwise it would disconnect clients whose messages wait for it when it runs again.
        """
        before, self._looked = self._looked, time.monotonic()
        self._running += min(self._looked - before, _LONGEST_ROUND)
        return self._running

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
                self._sockets[fd] = PendingSocket(self._now() + HANDSHAKE_TIMEOUT)
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
        while len(self._sockets) > most:
            self._close(next(iter(self._sockets)))
        if full:  # no descriptor is left: close half, first those that have sent nothing
            crowd = sorted(self._sockets, key=lambda fd: _received_nbytes(fd) > 0)
            for fd in crowd[: (len(crowd) + 1) // 2]:
                self._close(fd)

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
        # 3 s for the refusal to arrive
        self._sockets[fd] = PendingSocket(self._now() + 3, rejected=True)
        return True

    def close_expired(self) -> None:
        """Close connections that have timed out or have sent too many bytes."""
        now = self._now()
        for fd, pending in list(self._sockets.items()):
            if now > pending.deadline or _received_nbytes(fd) > _LARGEST_HANDSHAKE:
                self._close(fd)

    def _close(self, fd: int) -> None:
        rejected = self._sockets.pop(fd).rejected
        self._rejected["handshake timeout"] += not rejected
        with contextlib.suppress(OSError), _socket_of(fd) as connection:
            if not rejected:
                # reset it: one that sends would otherwise wait for room in a buffer
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.shutdown(socket.SHUT_RDWR)


def _received_nbytes(fd: int) -> int:
    """Return how many bytes have arrived over a connection; 0 where the system does not tell."""
    try:
        with _socket_of(fd) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        return int(struct.unpack_from("=Q", info, 128)[0])  # Linux: tcpi_bytes_received
    except (OSError, AttributeError, struct.error):
        return 0


@contextlib.contextmanager
def _socket_of(fd: int) -> Iterator[socket.socket]:
    """Use the connection of ZeroMQ; the descriptor is not duplicated: there may be none left."""
    connection = socket.socket(fileno=fd)
    try:
        yield connection
    finally:
        connection.detach()
