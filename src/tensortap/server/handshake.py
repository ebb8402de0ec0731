"""The server's side of the handshake: clients prove that they have the key."""

from __future__ import annotations

import collections
import secrets
import time
from typing import Any, NamedTuple

import zmq

from tensortap._version import __version__
from tensortap.buffers import MappedSegment
from tensortap.errors import Refused, WireError
from tensortap.server.sockets import HANDSHAKE_TIMEOUT
from tensortap.wire import keys
from tensortap.wire import messages as wire
from tensortap.wire.channel import version_mismatch

_MOST_CHALLENGED = 1000
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"


class _Challenged(NamedTuple):
    hello: wire.Hello
    nonce: bytes
    deadline: float


class Handshake:
    """Challenges clients, verifies their proofs, and counts rejected ones by reason."""

    def __init__(self, key: bytes, rejected: collections.Counter[str]) -> None:
        self.key = key
        self._rejected = rejected
        self._challenged: dict[bytes, _Challenged] = {}
        self._client_curve_key, _ = keys.curve_pair(key, "client")

    def challenge(self, route: bytes, hello: wire.Hello) -> wire.Challenge:
        """Return the answer to a hello; raise Refused if the client has another version."""
        if hello.protocol != wire.PROTOCOL:
            self._rejected["protocol version"] += 1
            raise Refused(version_mismatch(hello.protocol, hello.version))
        if len(hello.nonce) != keys.NONCE or hello.role not in ("source", "viewer"):
            raise WireError("a hello without a nonce or a role")
        if route in self._challenged:
            raise WireError("a second hello")
        if len(self._challenged) >= _MOST_CHALLENGED:
            del self._challenged[next(iter(self._challenged))]
        nonce = secrets.token_bytes(keys.NONCE)
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT
        self._challenged[route] = _Challenged(hello, nonce, deadline)
        mac = keys.proof(self.key, "server", hello.nonce, nonce)
        return wire.Challenge(wire.PROTOCOL, __version__, nonce, mac)

    def verified_role(self, route: bytes, proof: wire.Proof) -> str:
        """Return the role of a client that proves to have the key; raise Refused otherwise."""
        challenged = self._challenged.pop(route, None)
        if challenged is None:
            raise WireError("a proof without a challenge")
        nonces = challenged.hello.nonce, challenged.nonce
        if not keys.proven(self.key, "client", *nonces, proof.mac):
            self._rejected["wrong key"] += 1
            raise Refused("wrong key: set TENSORTAP_KEY to the key of this session")
        return challenged.hello.role

    def expire(self) -> None:
        """Forget clients that have not answered their challenge in time."""
        now = time.monotonic()
        for route in [r for r, each in self._challenged.items() if now > each.deadline]:
            del self._challenged[route]

    def answer_zap(self, zap: zmq.Socket[bytes]) -> None:
        """Tell ZeroMQ which CURVE keys to accept: only the clients' key, derived from ours."""
        from zmq.utils import z85

        while zap.poll(0):
            frames = zap.recv_multipart()
            sequence = frames[1] if len(frames) > 1 else b""
            curve = len(frames) == 7 and frames[5] == b"CURVE" and len(frames[6]) == 32
            accepted = curve and z85.encode(frames[6]) == self._client_curve_key
            if not accepted:
                self._rejected["wrong key"] += 1
            status = (b"200", b"OK", b"client") if accepted else (b"400", b"unknown key", b"")
            zap.send_multipart([b"1.0", sequence, *status, b""])


def bind_zap(context: zmq.Context[Any]) -> zmq.Socket[bytes]:
    """Return the socket on which ZeroMQ asks which CURVE keys to accept."""
    zap: zmq.Socket[bytes] = context.socket(zmq.REP)
    zap.linger = 0
    zap.bind(_ZAP_ENDPOINT)
    return zap


def read_nonce(arena: wire.Arena) -> bytes | None:
    """Return the nonce in a client's arena; None if this host has no such segment."""
    try:
        return bytes(memoryview(MappedSegment(arena.pid, arena.fd, 4096).memory)[:16])
    except (OSError, ValueError, OverflowError):
        return None
