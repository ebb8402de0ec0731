"""Who may come in: the server's side of the handshake."""

from __future__ import annotations

import collections
import secrets
import time
from typing import Any

import msgspec
import zmq

from tensortap._version import __version__
from tensortap.buffers import Mapped
from tensortap.errors import Refused, WireError
from tensortap.formats import keys, wire
from tensortap.formats.channel import version_mismatch

_PATIENCE = 10.0  # seconds a stranger has to prove himself
_STRANGERS = 1000
_ZAP = "inproc://zeromq.zap.01"


class Stranger(msgspec.Struct):
    """Somebody who has said hello and proven nothing yet."""

    hello: wire.Hello
    nonce: bytes
    since: float


class Door:
    """Challenges strangers and counts who was refused, and why."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.refused: collections.Counter[str] = collections.Counter()
        self._strangers: dict[bytes, Stranger] = {}
        self._client_curve, _ = keys.curve_pair(key, "client")

    def challenge(self, route: bytes, hello: wire.Hello) -> wire.Challenge:
        """The answer to a hello."""
        if hello.protocol != wire.PROTOCOL:
            raise Refused(version_mismatch(hello.protocol, hello.version))
        if len(hello.nonce) != keys.NONCE or hello.role not in ("source", "viewer"):
            raise WireError("a hello without a nonce or a role")
        if len(self._strangers) >= _STRANGERS:
            del self._strangers[next(iter(self._strangers))]
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
        """Forget those who said hello and nothing more."""
        limit = time.monotonic() - _PATIENCE
        for route in [r for r, s in self._strangers.items() if s.since < limit]:
            del self._strangers[route]
            self.refused["no proof"] += 1

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


def read_nonce(arena: wire.Arena) -> bytes | None:
    """What lies at that place on this host: the client can tell whether it is its own."""
    try:
        return bytes(memoryview(Mapped(arena.pid, arena.fd, 4096).memory)[:16])
    except (OSError, ValueError, OverflowError):
        return None
