"""Who may come in: the server's side of the handshake."""

from __future__ import annotations

import collections
import contextlib
import os
import secrets
import socket
import struct
import time
from typing import Any

import msgspec
import zmq

from tensortap._version import __version__
from tensortap.buffers import Mapped
from tensortap.errors import Refused, WireError
from tensortap.wire import keys
from tensortap.wire import messages as wire
from tensortap.wire.channel import version_mismatch

_PATIENCE = 10.0  # seconds a stranger has to prove himself
_ALLOWANCE = 2 * wire.LARGEST_MESSAGE  # and bytes: ZeroMQ would gather a message without end
_STRANGERS = 1000
_FAREWELL = 1.0  # seconds that the reason has to reach whoever was refused
_ZAP = "inproc://zeromq.zap.01"


class Stranger(msgspec.Struct):
    """Somebody who has said hello and proven nothing yet."""

    hello: wire.Hello
    nonce: bytes
    since: float


class Visitor(msgspec.Struct):
    """A connection whose other side has proven nothing yet, or was refused."""

    until: float
    counted: bool = False
    refused: bool = False


class Door:
    """Challenges strangers and counts who was refused, and why."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.refused: collections.Counter[str] = collections.Counter()
        self._strangers: dict[bytes, Stranger] = {}
        self._visitors: dict[int, Visitor] = {}  # by file descriptor
        self._client_curve, _ = keys.curve_pair(key, "client")

    def challenge(self, route: bytes, hello: wire.Hello) -> wire.Challenge:
        """The answer to a hello."""
        if hello.protocol != wire.PROTOCOL:
            raise Refused(version_mismatch(hello.protocol, hello.version))
        if len(hello.nonce) != keys.NONCE or hello.role not in ("source", "viewer"):
            raise WireError("a hello without a nonce or a role")
        if route in self._strangers:
            raise WireError("a second hello")
        if len(self._strangers) >= _STRANGERS:
            del self._strangers[next(iter(self._strangers))]
            self.refused["no proof"] += 1
        nonce = secrets.token_bytes(keys.NONCE)
        self._strangers[route] = Stranger(hello, nonce, time.monotonic())
        mac = keys.proof(self.key, "server", hello.nonce, nonce)
        return wire.Challenge(wire.PROTOCOL, __version__, nonce, mac)

    def admit(self, route: bytes, proof: wire.Proof) -> str:
        """The role of a stranger who has proven that he has the key."""
        stranger = self._strangers.pop(route, None)
        if stranger is None:
            raise WireError("a proof without a challenge")
        if not keys.proven(self.key, "client", stranger.hello.nonce, stranger.nonce, proof.mac):
            raise Refused("the key is not the one of this session: set TENSORTAP_KEY to its key")
        return stranger.hello.role

    def tidy(self) -> None:
        """Forget those who said hello and nothing more, and hang up on whoever stays."""
        now = time.monotonic()
        for route in [r for r, s in self._strangers.items() if s.since < now - _PATIENCE]:
            del self._strangers[route]
            self.refused["no proof"] += 1
        for fd, visitor in list(self._visitors.items()):
            if now > visitor.until or _received(fd) > _ALLOWANCE:
                del self._visitors[fd]
                if not visitor.counted:
                    self.refused["no proof"] += 1
                _hang_up(fd)

    @property
    def watching(self) -> bool:
        """Whether somebody is there who has proven nothing yet."""
        return bool(self._visitors)

    def enters(self, fd: int) -> None:
        """Somebody has connected."""
        self._visitors[fd] = Visitor(time.monotonic() + _PATIENCE)

    def greets(self, fd: int) -> None:
        """He has said hello: if nothing follows, that is counted with his challenge."""
        if fd in self._visitors:
            self._visitors[fd].counted = True

    def leaves(self, fd: int) -> None:
        """The connection is gone, or its other side has proven itself."""
        self._visitors.pop(fd, None)

    def refuses(self, fd: int) -> bool:
        """Hang up soon; whether he is to be told why: once, or the answers would pile up."""
        before = self._visitors.get(fd)
        if before is not None and before.refused:
            return False
        self._visitors[fd] = Visitor(time.monotonic() + _FAREWELL, counted=True, refused=True)
        return True

    def open_zap(self, context: zmq.Context[Any]) -> zmq.Socket[bytes]:
        """The socket on which ZeroMQ asks whose CURVE key is good."""
        zap: zmq.Socket[bytes] = context.socket(zmq.REP)
        zap.linger = 0
        zap.bind(_ZAP)
        return zap

    def vouch(self, zap: zmq.Socket[bytes]) -> None:
        """Answer ZeroMQ: only the clients' key, derived from ours, is good."""
        from zmq.utils import z85

        while zap.poll(0):
            frames = zap.recv_multipart()
            sequence = frames[1] if len(frames) > 1 else b""
            curve = len(frames) == 7 and frames[5] == b"CURVE" and len(frames[6]) == 32
            good = curve and z85.encode(frames[6]) == self._client_curve
            if not good:
                self.refused["wrong key"] += 1
            status = (b"200", b"OK", b"client") if good else (b"400", b"unknown key", b"")
            zap.send_multipart([b"1.0", sequence, *status, b""])


def _received(fd: int) -> int:
    """How many bytes have come over a connection, where the system tells."""
    with contextlib.suppress(OSError, AttributeError, struct.error):
        with socket.socket(fileno=os.dup(fd)) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        received: int = struct.unpack_from("=Q", info, 128)[0]  # Linux: tcpi_bytes_received
        return received
    return 0


def _hang_up(fd: int) -> None:
    """End a connection of ZeroMQ's, which then closes it itself."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def read_nonce(arena: wire.Arena) -> bytes | None:
    """What lies at that place on this host: the client can tell whether it is its own."""
    try:
        return bytes(memoryview(Mapped(arena.pid, arena.fd, 4096).memory)[:16])
    except (OSError, ValueError, OverflowError):
        return None
