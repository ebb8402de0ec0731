"""The server of a live session: one thread, one socket, any number of clients, one history."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import fnmatch
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from tensortap._version import __version__
from tensortap.capture.sink import Wake
from tensortap.core.errors import Refused, TensortapError, WireError
from tensortap.core.files import plain
from tensortap.core.history import History
from tensortap.core.limits import shortage
from tensortap.live import keys
from tensortap.live import messages as wire
from tensortap.live.address import Address
from tensortap.live.channel import version_mismatch
from tensortap.live.connection import Assembly, ClientState, Connection
from tensortap.live.handshake import PendingSockets, answer_zap, bind_router, read_nonce, source_fd
from tensortap.live.reserve import Reserve

log = logging.getLogger("tensortap")

_DRAIN_ROUNDS = 500  # of receiving without a message, after which a client that left sent no more

Answer = Callable[["Server", str, dict[str, Any]], bytes]


class Server:
    """Listens on an address and writes what clients send into its history.

    `rejected` counts rejected clients, messages and batches by reason. `accept` is a pattern of
    the paths of programs that may send.
    """

    def __init__(
        self,
        address: Address,
        history: History,
        key: bytes,
        *,
        answer: Answer | None = None,
        accept: str | None = None,
    ) -> None:
        self.history = history
        self.started = time.time()
        self.clients: dict[bytes, ClientState] = {}  # by the id of the program
        self.rejected: collections.Counter[str] = collections.Counter()
        self.key = key
        self.accept = accept
        self._warned = False
        self._client_key, _ = keys.curve_pair(key, "client")
        self._pending = PendingSockets(self.rejected)
        self._reserve = Reserve(history)
        self._connections: dict[bytes, Connection] = {}  # by ZeroMQ's routing id
        self._by_fd: dict[int, Connection] = {}
        self._disconnected: list[Connection] = []
        self._closing = False
        if lacking := shortage():
            raise TensortapError(f"cannot listen on {address}: {lacking}")
        self._context: zmq.Context[Any] = zmq.Context()
        self._router, self._monitor, self._zap = bind_router(self._context, address, key)
        port = self._router.get_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1]
        self.address = Address(address.host, int(port))
        self._wake = Wake()
        self._answer = answer
        # a thread of its own, so that long answers do not delay records
        self._viewers = concurrent.futures.ThreadPoolExecutor(1, "tensortap-answers")
        self._replies: collections.deque[tuple[bytes, list[Any]]] = collections.deque()
        self._thread = threading.Thread(target=self._run, name="tensortap-server", daemon=True)
        self._thread.start()
        if answer is not None:  # a worker keeps nothing
            self._reserve.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Say goodbye to all clients and stop listening; the history stays."""
        self._closing = True
        if self._thread.is_alive():
            self._wake.set()
            self._thread.join(5)
        self._viewers.shutdown(wait=False, cancel_futures=True)

    def control(self, control: wire.Control) -> list[ClientState]:
        """Send a request to all programs; each `answer` has its number once it has come."""
        clients = [each for each in list(self.clients.values()) if each.role == "source"]
        frames = wire.message(wire.CONTROL, control)
        for client in clients:
            if (connection := client.connection) is not None:
                self._replies.append((connection.route, frames))
        self._wake.set()
        return clients

    # -- the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        sockets = (self._router, self._monitor, self._wake.fileno(), self._zap)
        items: list[Any] = [(item, zmq.POLLIN) for item in sockets]
        try:
            while not self._closing:
                pause = 10 if self._disconnected else 500
                ready: list[Any] = [item for item, _ in zmq.zmq_poll(items, pause)]
                drained = self._router not in ready or self._receive()
                self._remove_disconnected(drained)
                if self._zap in ready:
                    answer_zap(self._zap, self._client_key)
                if self._monitor in ready:
                    self._read_monitor()
                if self._wake.fileno() in ready:
                    self._wake.clear()
                    while self._replies:
                        self._send(*self._replies.popleft())
                self._acknowledge()
            goodbye = wire.message(wire.GOODBYE, wire.Goodbye())
            for route in list(self._connections):
                self._send(route, goodbye)
        except Exception:
            log.exception("tensortap: the live session ended with an error")
        finally:
            self._reserve.close()
            self._router.disable_monitor()
            self._monitor.close(0)
            self._context.destroy(linger=200)
            self._wake.close()

    def _receive(self) -> bool:
        """Process received messages; return whether none are left."""
        end = time.monotonic() + 0.01  # then clients, acknowledgements and answers get their turn
        while time.monotonic() < end:
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            route = frames[0].bytes
            try:
                self._handle(route, frames)
            except Refused as error:  # counted where it was raised
                self._reject(route, str(error))
            except WireError as error:
                self._reject(route, str(error), "invalid message")
            except Exception as error:
                # one client must not disturb the others
                log.exception("tensortap: a message was rejected because of an error")
                self._reject(route, f"an error in the server: {error!r}", "error")
        return False

    def _handle(self, route: bytes, frames: list[zmq.Frame]) -> None:
        if not 3 <= len(frames) <= 4:
            raise WireError(f"a message of {len(frames) - 1} frames")
        kind = frames[1].bytes
        header = wire.read_header(kind, frames[2].buffer)
        data = memoryview(frames[3].buffer) if len(frames) == 4 else memoryview(b"")
        connection = self._connections.get(route)
        if connection is None:
            self._connect(route, header, source_fd(frames[1]))
            return
        connection.silent_rounds = 0
        if isinstance(header, wire.Chunk):
            connection.add_chunk(header, data)
            self._store_completed(connection)
        elif isinstance(header, wire.Batch):
            connection.start_batch(header, data, self.history.bound, self._reserve.empty)
            self._store_completed(connection)
        elif isinstance(header, wire.Query) and self._answer is not None:
            with contextlib.suppress(RuntimeError):  # this process is ending
                self._viewers.submit(self._reply, route, header, self._answer)
        elif isinstance(header, wire.State):
            connection.client.answer = header.number, bytes(data)
        elif isinstance(header, wire.Goodbye):
            self._disconnect(connection)
        else:
            raise WireError(f"{type(header).__name__} at the wrong time")

    def _store_completed(self, connection: Connection) -> None:
        for assembly in connection.completed():
            reason, count = assembly.rejected, 0
            if not reason:
                try:
                    count = self._store(assembly)
                except WireError as error:
                    log.debug("tensortap: a batch was rejected: %s", error)
                    reason = "invalid message"
            if reason:
                self.rejected[reason] += 1
            connection.finish(assembly, count, rejected=bool(reason))

    def _store(self, assembly: Assembly) -> int:
        """Write the records of a batch into the history; return how many there were."""
        batch = assembly.batch
        if batch.columns:
            self.history.write_columns(
                wire.decode_columns(batch.columns, batch.rows, assembly.body)
            )
            return batch.rows
        records = wire.decode_records(assembly.body, assembly.payloads)
        self.history.write(records)
        return len(records)

    def _acknowledge(self) -> None:
        for connection in self._connections.values():
            ack = connection.take_ack()
            if ack is not None:
                self._send(connection.route, wire.message(wire.ACK, ack))

    def _reply(self, route: bytes, query: wire.Query, answer: Answer) -> None:
        """Answer the question of a viewer, in a thread of its own."""
        body, error = b"", ""
        try:
            body = answer(self, query.what, query.arguments)
        except TensortapError as problem:
            error = str(problem)
        except Exception as problem:
            log.exception("tensortap: failed to answer a viewer")
            error = repr(problem)
        reply = wire.message(wire.REPLY, wire.Reply(query.id, error[:10_000], len(body)))
        chunks = wire.chunks(query.id, wire.BODY, memoryview(body))
        self._replies.extend((route, frames) for frames in (reply, *chunks))
        self._wake.set()

    def _send(self, route: bytes, frames: list[Any]) -> None:
        # a client that has disconnected is removed when the monitor reports it
        with contextlib.suppress(zmq.ZMQError):
            self._router.send_multipart([route, *frames])

    # -- connections ---------------------------------------------------------------------

    def _connect(self, route: bytes, hello: msgspec.Struct, fd: int) -> None:
        """Welcome a client; raise Refused if it has another version."""
        # first the events before: the file descriptor may have been another connection's
        self._read_monitor()
        if not isinstance(hello, wire.Hello):
            raise WireError("a message before the hello")
        if hello.protocol != wire.PROTOCOL:
            self.rejected["protocol version"] += 1
            raise Refused(version_mismatch(hello.protocol, hello.version))
        if hello.role not in ("source", "viewer"):
            raise WireError("a hello without a role")
        if hello.role == "source":
            self._check_program(hello.client)
        self._pending.done(fd)
        client = self.clients.get(hello.client.id) or ClientState(hello.client, hello.role)
        if client.connection is not None:
            self._disconnect(client.connection)
        self.clients[hello.client.id] = client
        nonce = read_nonce(hello.arena) if hello.arena is not None else None
        arena_pid = hello.arena.pid if hello.arena is not None and nonce is not None else None
        connection = Connection(client, route, arena_pid)
        client.info, client.connection = hello.client, connection
        granted = sum([other.credit for other in self._connections.values()])
        spare = max(0, self.history.bound // 2 - granted)
        connection.credit = max(4 << 20, min(256 << 20, spare // 4))
        self._connections[route] = connection
        if fd >= 0:
            self._by_fd[fd] = connection
        welcome = wire.Welcome(connection.credit, self.history.bound, nonce)
        self._send(route, wire.message(wire.WELCOME, welcome))

    def _check_program(self, info: wire.Client) -> None:
        """Raise Refused if a program may not send here; warn if two different ones do."""
        program, accept = info.program, self.accept
        if accept and not any(fnmatch.fnmatchcase(program, p) for p in (accept, f"*/{accept}")):
            self.rejected["not accepted"] += 1
            raise Refused(f"it accepts only {accept!r}, and this is {program}")
        others = {c.info.program for c in self.clients.values() if c.role == "source"} - {program}
        if others and not self._warned:
            self._warned = True
            log.warning(
                "tensortap: %s sends to this session as well as %s: values of the same name mix; "
                "tap.serve(accept='%s') takes one program, TENSORTAP_PORT gives each a session",
                plain(program, 300), plain(min(others), 300), plain(os.path.basename(program)),
            )  # fmt: skip

    def _read_monitor(self) -> None:
        for fd in self._pending.read(self._monitor):
            connection = self._by_fd.pop(fd, None)
            if connection is not None:
                connection.silent_rounds = 0
                self._disconnected.append(connection)

    def _remove_disconnected(self, drained: bool) -> None:
        """Remove disconnected clients after draining their messages."""
        # with many busy clients the socket is never drained. Rounds are counted, not seconds: while
        # this process is stopped or starved, time passes and nothing is received
        waiting = []
        for connection in self._disconnected:
            connection.silent_rounds += 1
            if not drained and connection.silent_rounds <= _DRAIN_ROUNDS:
                waiting.append(connection)
            else:
                self._disconnect(connection)
        self._disconnected = waiting

    def _reject(self, route: bytes, why: str, reason: str = "") -> None:
        if reason:
            self.rejected[reason] += 1
        refusal = wire.Refusal(why[:1000], version=__version__)
        self._send(route, wire.message(wire.REFUSED, refusal))
        connection = self._connections.get(route)
        if connection is not None:
            self._disconnect(connection)

    def _disconnect(self, connection: Connection) -> None:
        """Close a connection and forget a viewer; programs that sent records stay known."""
        if self._connections.get(connection.route) is not connection:
            return
        del self._connections[connection.route]
        connection.close()
        if connection.client.role == "viewer":
            self.clients.pop(connection.client.info.id, None)
