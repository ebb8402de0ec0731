"""A client's connection to a live session: sockets, encryption, and the handshake.

The channel knows nothing of records. It finds the server, proves the key to it (and has the
server prove it first), and then passes messages. ZeroMQ looks for an absent server in a
thread of its own, with growing pauses; a lost connection is opened anew, so that no message
meant for the old server reaches the new one.
"""

from __future__ import annotations

import contextlib
import enum
import secrets
import time
from typing import Any

import msgspec
import zmq
import zmq.utils.z85  # here, not in the thread: a fork in mid-import leaves its lock behind
from zmq.utils.monitor import recv_monitor_message

from tensortap._version import __version__
from tensortap.errors import Refused, WireError
from tensortap.wire import keys
from tensortap.wire import messages as wire
from tensortap.wire.address import Address

NO_KEY = "there is no key: the first tap.serve() makes one, or set TENSORTAP_KEY"
_GREETING = 1.0  # seconds a server has for each word of the handshake
_EVENTS = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


class ConnectionState(enum.Enum):
    """Where a channel is."""

    SEEKING = "seeking"  # nothing is known yet
    ABSENT = "absent"  # no server, or none that takes us; still looking
    OPEN = "open"


class Channel:
    """One connection, used by one thread."""

    def __init__(
        self, address: Address, role: str, context: zmq.Context[Any], key: bytes | None = None
    ) -> None:
        self.address = address
        self._own_key = key  # instead of the user's: between a program and its own worker
        self.role = role
        self.state = ConnectionState.SEEKING
        self.welcome: wire.Welcome | None = None
        self.refusal = ""  # why a server that is there did not take us
        self.proof: wire.Proof | None = None  # what to say about ourselves; set by the owner
        self._context = context
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        # beyond loopback always encrypted; a server on all interfaces wants it of everybody
        self._curve = not address.loopback
        self._key: bytes | None = None
        self._nonce = b""
        self._proven = False  # whether the server has shown that it has the key
        self._deadline: float | None = None  # of the handshake
        self._retry_at = 0.0
        self._pause = 0.1

    def send(self, frames: list[Any], *, copy: bool = True) -> None:
        """Send a message; the socket queues it without end: credits bound what is under way."""
        assert self._socket is not None
        if copy:
            self._socket.send_multipart(frames)
            return
        self._socket.send_multipart(frames[:-1], zmq.SNDMORE)
        try:
            self._socket.send(frames[-1], copy=False)
        except (zmq.ZMQError, RuntimeError):
            # it takes a thread and sockets of pyzmq's own: no descriptors are left, or they have
            # ended before us at exit
            self._socket.send(frames[-1])

    def poll(self, timeout: float, wake: int | None = None) -> list[tuple[bytes, Any, Any]]:
        """Messages that came, after at most `timeout` seconds: (kind, header, body)."""
        self._tend()
        now = time.monotonic()
        for moment in (self._deadline, self._retry_at if self._socket is None else None):
            if moment is not None:
                timeout = min(timeout, max(0.0, moment - now))
        items: list[Any] = [(s, zmq.POLLIN) for s in (self._socket, self._monitor) if s is not None]
        if wake is not None:
            items.append((wake, zmq.POLLIN))
        ready: list[Any] = [item for item, _ in zmq.zmq_poll(items, int(timeout * 1000 + 0.999))]
        found = self._receive() if self._socket in ready else []
        if self._monitor in ready:
            self._watch()
        return found

    def close(self, linger: int = 0) -> None:
        """Close the sockets; what is under way has `linger` milliseconds to leave."""
        if self._socket is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disable_monitor()
            if self._monitor is not None:
                self._monitor.close(0)
            self._socket.close(linger)
        self._socket = self._monitor = None
        self._deadline = None
        self.welcome = None

    def _tend(self) -> None:
        now = time.monotonic()
        if self._deadline is not None and now > self._deadline:
            self._fail("the server does not answer as a tensortap session does", other_way=True)
        if self._socket is None and now >= self._retry_at:
            self._open()

    def _open(self) -> None:
        try:
            self._key = self._own_key or keys.find_key()
        except keys.KeyFileError as error:
            self._fail(str(error))
            return
        if self._key is None:
            self._fail(NO_KEY)
            return
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.sndhwm = 0
        socket.rcvhwm = 0
        socket.sndbuf = 1 << 20
        socket.maxmsgsize = wire.LARGEST_MESSAGE
        socket.connect_timeout = 3000  # a host that does not even refuse is absent
        socket.reconnect_ivl = 100
        socket.reconnect_ivl_max = 3000
        socket.set(zmq.HEARTBEAT_IVL, 3000)
        socket.set(zmq.HEARTBEAT_TIMEOUT, 15000)
        socket.ipv6 = ":" in self.address.host
        if self._curve:
            socket.curve_serverkey, _ = keys.curve_pair(self._key, "server")
            socket.curve_publickey, socket.curve_secretkey = keys.curve_pair(self._key, "client")
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._socket = socket
        try:
            socket.connect(self.address.endpoint)
        except zmq.ZMQError as error:
            self._fail(f"cannot connect to {self.address}: {error}")

    def _watch(self) -> None:
        while self._monitor is not None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._nonce = secrets.token_bytes(keys.NONCE)
                self._proven = False
                hello = wire.Hello(wire.PROTOCOL, __version__, self.role, self._nonce)
                self.send(wire.message(wire.HELLO, hello))
                self._deadline = time.monotonic() + _GREETING
            elif event == zmq.EVENT_CONNECT_RETRIED:
                self.state = ConnectionState.ABSENT
                self.refusal = ""
            elif event == zmq.EVENT_DISCONNECTED:
                # while a handshake goes on this is how a server that wants another one says no
                was_open = self.state is ConnectionState.OPEN
                self._fail("" if was_open else self.refusal, other_way=not was_open, at_once=True)
            else:
                self._fail("the server wants another key or another kind of connection", True)

    def _fail(self, why: str, other_way: bool = False, at_once: bool = False) -> None:
        """Close; try again later, on loopback with the other kind of connection."""
        self.close()
        self.refusal = why
        if other_way and self.address.loopback:
            self._curve = not self._curve
            at_once = at_once or self._curve
            if self._curve and self.state is ConnectionState.SEEKING:
                self._retry_at = time.monotonic()
                return
        self.state = ConnectionState.ABSENT
        self._pause = 0.1 if at_once and self._pause > 1 else min(self._pause * 2, 3.0)
        self._retry_at = time.monotonic() + self._pause

    def _receive(self) -> list[tuple[bytes, Any, Any]]:
        found: list[tuple[bytes, Any, Any]] = []
        while self._socket is not None:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                kind, header = frames[0], wire.read_header(frames[0], frames[1])
                if self.state is not ConnectionState.OPEN:
                    self._shake(header)
                elif isinstance(header, wire.Refusal):
                    raise _refused(header)
                elif kind == wire.GOODBYE:
                    self._fail("", at_once=True)
                else:
                    found.append((kind, header, frames[2] if len(frames) > 2 else None))
            except (WireError, Refused, IndexError) as error:
                self._fail(str(error))
        return found

    def _shake(self, header: msgspec.Struct) -> None:
        """The client's side of the handshake."""
        assert self._key is not None
        if isinstance(header, wire.Refusal):
            raise _refused(header)
        if isinstance(header, wire.Challenge) and not self._proven:
            if header.protocol != wire.PROTOCOL:
                raise Refused(version_mismatch(header.protocol, header.version))
            if not keys.proven(self._key, "server", self._nonce, header.nonce, header.mac):
                raise Refused(
                    f"the session at {self.address} has another key: set TENSORTAP_KEY to its key"
                )
            self._proven = True
            mac = keys.proof(self._key, "client", self._nonce, header.nonce)
            proof = self.proof or wire.Proof(b"", wire.Client(b""))
            self.send(wire.message(wire.PROOF, msgspec.structs.replace(proof, mac=mac)))
            self._deadline = time.monotonic() + _GREETING
            return
        welcome = wire.expect(header, wire.Welcome)
        if not self._proven:  # or whoever holds the port would be sent everything
            raise Refused(f"the session at {self.address} did not prove that it has the key")
        self.welcome = welcome
        self._deadline = None
        self._pause = 0.1
        self.refusal = ""
        self.state = ConnectionState.OPEN


def _refused(header: wire.Refusal) -> Refused:
    # which side is behind is told from here: the server's words would call itself "this side"
    if header.protocol != wire.PROTOCOL:
        return Refused(version_mismatch(header.protocol, header.version))
    return Refused(_printable(header.reason))


def _printable(words: str) -> str:
    """Words of somebody who has proven nothing, fit for a log and a terminal."""
    return "".join(c if c.isprintable() else "�" for c in words[:300])


def version_mismatch(protocol: int, version: str) -> str:
    """What to say when the other side speaks another version of the protocol."""
    version = _printable(version[:40])
    theirs, ours = f"{version} (protocol {protocol})", f"{__version__} (protocol {wire.PROTOCOL})"
    which = "this" if protocol > wire.PROTOCOL else "the other"
    return f"the other side runs tensortap {theirs}, this one {ours}: upgrade {which} side"
