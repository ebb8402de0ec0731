"""A client's connection to a server: sockets, encryption, and the handshake.

The channel knows nothing of records. It connects to the server, introduces the client, and then
passes messages. CURVE encrypts every connection and lets both sides prove that they have the key,
also on loopback, where another user's process could relay what it reads. ZeroMQ retries in a
thread of its own, with growing pauses. A lost connection gets a new socket, so that no message
meant for the old server reaches the next one.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import time
from typing import Any

import zmq
import zmq.utils.z85  # not in the thread: a fork during the import would leave its lock locked
from zmq.utils import garbage  # now: what ends first at exit is what was imported last
from zmq.utils.monitor import recv_monitor_message

from tensortap._version import __version__
from tensortap.core.errors import Refused, WireError
from tensortap.core.files import plain
from tensortap.core.limits import shortage
from tensortap.live import keys
from tensortap.live import messages as wire
from tensortap.live.address import Address

NO_KEY = (
    "no key on this machine: the first tap.serve() here creates one; for a session on another "
    "machine, copy its key file or set TENSORTAP_KEY"
)
_TIMEOUT = 30.0  # seconds for the handshake, and for the server's answer: it may be busy
_SILENT = f"the server did not answer within {_TIMEOUT:.0f} s; it is overloaded or stopped"
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | _FAILED
)


class ConnectionState(enum.Enum):
    SEEKING = "seeking"  # the first attempt is still running
    ABSENT = "absent"  # no server, or one that rejects us; the channel keeps trying
    OPEN = "open"


class Channel:
    """One connection, used by one thread; `hello` introduces the client."""

    def __init__(self, address: Address, hello: wire.Hello, key: bytes | None = None) -> None:
        self.address = address
        self.hello = hello
        self.state = ConnectionState.SEEKING
        self.welcome: wire.Welcome | None = None
        self.refusal = ""  # why there is no connection, if somebody listens
        self._own_key = key  # instead of the user's key, for a worker process
        self._context: zmq.Context[Any] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._deadline: float | None = None  # of the server's answer
        self._retry_at = 0.0
        self._pause = 0.1

    def send(self, frames: list[Any], *, copy: bool = True) -> None:
        """Queue a message for sending; credits bound what is in flight, not the socket."""
        assert self._socket is not None
        if copy:
            self._socket.send_multipart(frames)
            return
        self._socket.send_multipart(frames[:-1], zmq.SNDMORE)
        # sending without a copy needs a context and a thread of pyzmq
        room = garbage.gc.is_alive() or not shortage()
        try:
            self._socket.send(frames[-1], copy=not room)
        except (zmq.ZMQError, RuntimeError):  # they have ended at exit
            self._socket.send(frames[-1])

    def poll(self, timeout: float, wake: int | None = None) -> list[tuple[bytes, Any, Any]]:
        """Return received messages as (kind, header, body); wait at most `timeout` seconds."""
        now = time.monotonic()
        if self._deadline is not None and now > self._deadline:
            self._fail(_SILENT)
        if self._socket is None and now >= self._retry_at:
            self._open()
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

    def end(self, linger: int) -> None:
        self.close(linger)
        if self._context is not None:
            # not term(): it would wait for the server, and the program wants to end
            with contextlib.suppress(zmq.ZMQError):
                self._context.destroy(linger)

    def _open(self) -> None:
        try:
            key = self._own_key or keys.find_key()
            if key is None:
                self._fail(NO_KEY)
                return
            server_key, _ = keys.curve_pair(key, "server")
            own_keys = keys.curve_pair(key, "client")
        except keys.KeyFileError as error:
            self._fail(str(error))
            return
        if lacking := shortage():
            self._fail(lacking)
            return
        self._context = self._context or zmq.Context()
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.sndhwm = 0
        socket.rcvhwm = 0
        socket.sndbuf = 1 << 20
        socket.maxmsgsize = wire.LARGEST_FRAME
        socket.connect_timeout = 3000  # some hosts drop packets instead of refusing
        socket.reconnect_ivl = 100
        socket.reconnect_ivl_max = 3000
        socket.handshake_ivl = int(_TIMEOUT * 1000)
        socket.set(zmq.HEARTBEAT_IVL, 3000)
        socket.set(zmq.HEARTBEAT_TIMEOUT, 15000)
        socket.ipv6 = ":" in self.address.host
        socket.curve_serverkey = server_key
        socket.curve_publickey, socket.curve_secretkey = own_keys
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._socket = socket
        try:
            socket.connect(self.address.endpoint)
        except zmq.ZMQError as error:
            self._fail(f"cannot connect to {self.address}: {error}")

    def _read_monitor(self) -> None:
        while self._monitor is not None and self._monitor.poll(0):
            message = recv_monitor_message(self._monitor)
            event, value = message["event"], message["value"]
            if event == zmq.EVENT_CONNECTED:
                self.refusal = "the server has not answered yet"
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.send(wire.message(wire.HELLO, self.hello))
                self._deadline = time.monotonic() + _TIMEOUT
            elif event == zmq.EVENT_CONNECT_RETRIED:
                self.state = ConnectionState.ABSENT
                self.refusal = ""
            elif event & _FAILED and value == errno.EAGAIN:
                self._fail(_SILENT)
            elif self.state is ConnectionState.OPEN or self._deadline is not None:
                self._fail("")  # disconnected after the handshake: the server has ended
            else:
                self._fail(
                    f"the server at {self.address} rejects our key, or is not a tensortap server "
                    "of this version: set TENSORTAP_KEY to its key, or TENSORTAP_PORT to a port of "
                    "your own"
                )

    def _fail(self, why: str) -> None:
        """Close, and retry later."""
        self.close()
        self.refusal = why
        self.state = ConnectionState.ABSENT
        self._pause = min(self._pause * 2, 3.0)
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
                if isinstance(header, wire.Refusal):
                    # the server's own message would call the server "this side"
                    other = header.protocol != wire.PROTOCOL
                    words = version_mismatch(header.protocol, header.version) if other else ""
                    raise Refused(words or plain(header.reason, 300))
                if self.state is not ConnectionState.OPEN:
                    self._welcomed(header)
                elif kind == wire.GOODBYE:
                    self._fail("")
                else:
                    messages.append((kind, header, frames[2] if len(frames) > 2 else None))
            except (WireError, Refused, IndexError) as error:
                self._fail(str(error))
        return messages

    def _welcomed(self, header: object) -> None:
        if not isinstance(header, wire.Welcome):
            raise WireError(f"{type(header).__name__} before the welcome")
        self.welcome = header
        self._deadline = None
        self._pause = 0.1
        self.refusal = ""
        self.state = ConnectionState.OPEN


def version_mismatch(protocol: int, version: str) -> str:
    """Return the message for another version of the protocol on the other side."""
    version = plain(version, 40)
    theirs, ours = f"{version} (protocol {protocol})", f"{__version__} (protocol {wire.PROTOCOL})"
    which = "this" if protocol > wire.PROTOCOL else "the other"
    return f"the other side runs tensortap {theirs}, this one {ours}: upgrade {which} side"
