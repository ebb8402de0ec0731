"""A client's connection to a server: sockets, encryption, and the handshake.

The channel knows nothing of records. It connects to the server, lets the server prove that it has
the key, proves the same, and then passes messages. ZeroMQ retries in a thread of its own, with
growing pauses. A lost connection gets a new socket, so that no message meant for the old server
reaches the next one.
"""

from __future__ import annotations

import contextlib
import enum
import secrets
import time
from typing import Any

import msgspec
import zmq
import zmq.utils.z85  # not in the thread: a fork during the import would leave its lock locked
from zmq.utils.monitor import recv_monitor_message

from tensortap._version import __version__
from tensortap.errors import Refused, WireError
from tensortap.wire import keys
from tensortap.wire import messages as wire
from tensortap.wire.address import Address

NO_KEY = "no key yet: the first tap.serve() creates one, or set TENSORTAP_KEY"
_HANDSHAKE_TIMEOUT = 1.0  # seconds for each answer of the server
_EVENTS = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


class ConnectionState(enum.Enum):
    """The state of a channel."""

    SEEKING = "seeking"  # the first attempt is still running
    ABSENT = "absent"  # no server, or one that rejects us; the channel keeps trying
    OPEN = "open"


class Channel:
    """One connection, used by one thread."""

    def __init__(
        self, address: Address, role: str, context: zmq.Context[Any], key: bytes | None = None
    ) -> None:
        self.address = address
        self._own_key = key  # instead of the user's key, for a worker process
        self.role = role
        self.state = ConnectionState.SEEKING
        self.welcome: wire.Welcome | None = None
        self.refusal = ""  # why the server rejected us
        self.proof: wire.Proof | None = None  # introduces the client; its mac is filled in here
        self._context = context
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        # on loopback both are tried: a server on all interfaces encrypts every connection
        self._encrypted = not address.loopback
        self._key: bytes | None = None
        self._nonce = b""
        self._server_proven = False  # whether the server has proven that it has the key
        self._deadline: float | None = None  # of the handshake
        self._retry_at = 0.0
        self._pause = 0.1

    def send(self, frames: list[Any], *, copy: bool = True) -> None:
        """Queue a message for sending; credits bound what is in flight, not the socket."""
        assert self._socket is not None
        if copy:
            self._socket.send_multipart(frames)
            return
        self._socket.send_multipart(frames[:-1], zmq.SNDMORE)
        try:
            self._socket.send(frames[-1], copy=False)
        except (zmq.ZMQError, RuntimeError):
            # sending without a copy needs a thread and sockets of pyzmq: they may have ended at
            # exit, or no file descriptors are left
            self._socket.send(frames[-1])

    def poll(self, timeout: float, wake: int | None = None) -> list[tuple[bytes, Any, Any]]:
        """Return received messages as (kind, header, body); wait at most `timeout` seconds."""
        self._check_deadlines()
        now = time.monotonic()
        for deadline in (self._deadline, self._retry_at if self._socket is None else None):
            if deadline is not None:
                timeout = min(timeout, max(0.0, deadline - now))
        items: list[Any] = [(s, zmq.POLLIN) for s in (self._socket, self._monitor) if s is not None]
        if wake is not None:
            items.append((wake, zmq.POLLIN))
        ready: list[Any] = [item for item, _ in zmq.zmq_poll(items, int(timeout * 1000 + 0.999))]
        messages = self._receive() if self._socket in ready else []
        if self._monitor in ready:
            self._read_monitor()
        return messages

    def close(self, linger: int = 0) -> None:
        """Close the sockets; queued messages have `linger` milliseconds to be sent."""
        if self._socket is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disable_monitor()
            if self._monitor is not None:
                self._monitor.close(0)
            self._socket.close(linger)
        self._socket = self._monitor = None
        self._deadline = None
        self.welcome = None

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if self._deadline is not None and now > self._deadline:
            self._fail("no tensortap server answers there", switch_encryption=True)
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
        socket.connect_timeout = 3000  # some hosts drop packets instead of refusing
        socket.reconnect_ivl = 100
        socket.reconnect_ivl_max = 3000
        socket.set(zmq.HEARTBEAT_IVL, 3000)
        socket.set(zmq.HEARTBEAT_TIMEOUT, 15000)
        socket.ipv6 = ":" in self.address.host
        if self._encrypted:
            socket.curve_serverkey, _ = keys.curve_pair(self._key, "server")
            socket.curve_publickey, socket.curve_secretkey = keys.curve_pair(self._key, "client")
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._socket = socket
        try:
            socket.connect(self.address.endpoint)
        except zmq.ZMQError as error:
            self._fail(f"cannot connect to {self.address}: {error}")

    def _read_monitor(self) -> None:
        while self._monitor is not None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._nonce = secrets.token_bytes(keys.NONCE)
                self._server_proven = False
                hello = wire.Hello(wire.PROTOCOL, __version__, self.role, self._nonce)
                self.send(wire.message(wire.HELLO, hello))
                self._deadline = time.monotonic() + _HANDSHAKE_TIMEOUT
            elif event == zmq.EVENT_CONNECT_RETRIED:
                self.state = ConnectionState.ABSENT
                self.refusal = ""
            elif event == zmq.EVENT_DISCONNECTED:
                # a server that expects encryption disconnects during the handshake
                was_open = self.state is ConnectionState.OPEN
                reason = "" if was_open else self.refusal
                self._fail(reason, switch_encryption=not was_open, at_once=True)
            else:
                reason = "the server has another key or another encryption setting"
                self._fail(reason, switch_encryption=True)

    def _fail(self, why: str, switch_encryption: bool = False, at_once: bool = False) -> None:
        """Close and retry later; on loopback with or without encryption in turn."""
        self.close()
        self.refusal = why
        if switch_encryption and self.address.loopback:
            self._encrypted = not self._encrypted
            at_once = at_once or self._encrypted
            if self._encrypted and self.state is ConnectionState.SEEKING:
                self._retry_at = time.monotonic()
                return
        self.state = ConnectionState.ABSENT
        self._pause = 0.1 if at_once and self._pause > 1 else min(self._pause * 2, 3.0)
        self._retry_at = time.monotonic() + self._pause

    def _receive(self) -> list[tuple[bytes, Any, Any]]:
        messages: list[tuple[bytes, Any, Any]] = []
        while self._socket is not None:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                kind, header = frames[0], wire.read_header(frames[0], frames[1])
                if self.state is not ConnectionState.OPEN:
                    self._continue_handshake(header)
                elif isinstance(header, wire.Refusal):
                    raise _refused(header)
                elif kind == wire.GOODBYE:
                    self._fail("", at_once=True)
                else:
                    messages.append((kind, header, frames[2] if len(frames) > 2 else None))
            except (WireError, Refused, IndexError) as error:
                self._fail(str(error))
        return messages

    def _continue_handshake(self, header: msgspec.Struct) -> None:
        """Answer a message of the handshake; raise Refused if the server cannot be trusted."""
        assert self._key is not None
        if isinstance(header, wire.Refusal):
            raise _refused(header)
        if isinstance(header, wire.Challenge) and not self._server_proven:
            if header.protocol != wire.PROTOCOL:
                raise Refused(version_mismatch(header.protocol, header.version))
            if not keys.proven(self._key, "server", self._nonce, header.nonce, header.mac):
                raise Refused(
                    f"the session at {self.address} has another key: set TENSORTAP_KEY to its key"
                )
            self._server_proven = True
            mac = keys.proof(self._key, "client", self._nonce, header.nonce)
            proof = self.proof or wire.Proof(b"", wire.Client(b""))
            self.send(wire.message(wire.PROOF, msgspec.structs.replace(proof, mac=mac)))
            self._deadline = time.monotonic() + _HANDSHAKE_TIMEOUT
            return
        if not isinstance(header, wire.Welcome):
            raise WireError(f"{type(header).__name__} during the handshake")
        if not self._server_proven:  # any process on that port would receive our tensors
            raise Refused(f"the session at {self.address} did not prove that it has the key")
        self.welcome = header
        self._deadline = None
        self._pause = 0.1
        self.refusal = ""
        self.state = ConnectionState.OPEN


def _refused(header: wire.Refusal) -> Refused:
    # the server's own message would call the server "this side"
    if header.protocol != wire.PROTOCOL:
        return Refused(version_mismatch(header.protocol, header.version))
    return Refused(_printable(header.reason))


def _printable(text: str) -> str:
    """Return text of an unknown server without control characters, truncated."""
    return "".join(c if c.isprintable() else "�" for c in text[:300])


def version_mismatch(protocol: int, version: str) -> str:
    """Return the message for another version of the protocol on the other side."""
    version = _printable(version[:40])
    theirs, ours = f"{version} (protocol {protocol})", f"{__version__} (protocol {wire.PROTOCOL})"
    which = "this" if protocol > wire.PROTOCOL else "the other"
    return f"the other side runs tensortap {theirs}, this one {ours}: upgrade {which} side"
