"""Test clients: one that sends anything, and one that behaves like a training program."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import threading
import time

import zmq

from tensortap.capture.ledger import Ledger
from tensortap.capture.queue import Queue, write_to
from tensortap.core.buffers import Pool
from tensortap.core.record import Kind, Record, TensorData
from tensortap.live import keys
from tensortap.live import messages as wire
from tensortap.live.sink import LiveSink

_seq = itertools.count()


def record(name="x", value=1.5, *, step=0, rank=0, **fields) -> Record:
    """Return a record as a source creates it."""
    now = time.time_ns()
    return Record(name, Kind.VALUE, step, 0, next(_seq), rank, 1, now, value=value, **fields)


class RealClient:
    """A real client, with queue, thread, socket and arena."""

    def __init__(self, address, arena=True) -> None:
        self.pool = Pool()
        self.ledger = Ledger()
        self.sink = LiveSink(address, self.pool, self.ledger, arena=arena)
        self.queue = Queue(self.sink, budget=64 << 20, name="real")

    @property
    def state(self) -> str:
        """The state of the connection, as the receipt shows it."""
        return self.ledger.sessions[str(self.sink.address)]

    def deliver(self, name="real", nbytes=100_000, timeout=60) -> bool:
        """Send a tensor; return whether the server acknowledges it."""
        lease = self.pool.acquire(nbytes)
        lease.writable[:] = b"\x07" * nbytes
        one = record(name, TensorData("numpy", "uint8", (nbytes,), lease))
        return write_to([self.queue], one, nbytes).wait(timeout)

    def close(self) -> None:
        self.queue.close(1.0)


def assert_serves(server, *, name="later") -> None:
    """Check that a new client can send through shared memory and over TCP."""
    before = len(server.history.records(name))
    for arena in (True, False):
        client = RealClient(server.address, arena)
        try:
            assert client.deliver(name)
        finally:
            client.close()
    found = server.history.records(name)[before:]
    assert [bytes(r.value.data) for r in found] == [b"\x07" * 100_000] * 2


class RawClient:
    """A ZeroMQ client that sends whatever a test tells it to."""

    def __init__(self, address, key: bytes | None = None, pair=None, context=None) -> None:
        key = keys.find_key() if key is None else key
        self.context = zmq.Context() if context is None else context
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.curve_serverkey, _ = keys.curve_pair(key, "server")
        pair = keys.curve_pair(key, "client") if pair is None else pair
        self.socket.curve_publickey, self.socket.curve_secretkey = pair
        self.socket.connect(address.endpoint)
        self.numbers = itertools.count(1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        self.context.destroy(linger=0)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def send_message(self, kind: bytes, header, *body: bytes) -> None:
        self.send(*wire.message(kind, header), *body)

    def receive(self, timeout: float = 60.0):
        """Return the header of the next message, or None."""
        if not self.socket.poll(timeout * 1000):
            return None
        frames = self.socket.recv_multipart()
        return wire.read_header(frames[0], frames[1])

    def receive_a(self, kind, timeout: float = 60.0):
        """Return the next header of this type; skip others."""
        while (header := self.receive(timeout)) is not None:
            if isinstance(header, kind):
                return header
        raise AssertionError(f"received no {kind.__name__}")

    def hello(
        self, *, role="source", protocol=wire.PROTOCOL, version="0.1.0", timeout=60, **fields
    ):
        """Say hello; return the answer."""
        fields.setdefault("client", wire.Client(secrets.token_bytes(16), program="raw"))
        self.send_message(wire.HELLO, wire.Hello(protocol, version, role, **fields))
        return self.receive(timeout)

    def connect(self, role="source", **fields):
        """Complete the handshake; return the welcome."""
        welcome = self.hello(role=role, **fields)
        assert isinstance(welcome, wire.Welcome)
        return welcome

    def send_batch(self, body: bytes = b"\x90", number: int | None = None, **fields) -> int:
        """Send a batch with this body."""
        number = next(self.numbers) if number is None else number
        fields = {"body_nbytes": len(body), "cost": 0, **fields}
        whole = len(body) <= wire.CHUNK_NBYTES
        self.send_message(wire.RECORDS, wire.Batch(number, **fields), body if whole else b"")
        for frames in () if whole else wire.chunks(number, wire.BODY, memoryview(body)):
            self.send(*frames)
        return number


class Proxy:
    """A TCP relay that records every byte, and that can be cut or hold back what servers say."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        self.sent = bytearray()  # by clients alone
        self.deaf = False  # what the server says does not arrive
        self._target = port
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._pairs.append((client, server))
                for pair in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _read(self, source: socket.socket) -> bytes:
        return source.recv(1 << 16)

    def _pass(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := self._read(source):
                self.seen += data
                if up:
                    self.sent += data
                if up or not self.deaf:
                    target.sendall(data)
        _shut_down(source, target)

    def cut(self) -> None:
        """Break all connections."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _shut_down(*pair)
            for end in pair:
                end.close()

    def close(self) -> None:
        _shut_down(self._listener)
        self._listener.close()
        self.cut()


def _shut_down(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
