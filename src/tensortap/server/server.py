"""A live session: one thread, one socket, any number of clients, one history."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import queue
import socket as sockets
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from tensortap._version import __version__
from tensortap.buffers import Mapped, OutOfMemory, Pool, Slot
from tensortap.errors import Refused, TensortapError, WireError
from tensortap.history import History
from tensortap.record import Record
from tensortap.server.assembly import Assembly, Unreachable
from tensortap.server.client import Peer
from tensortap.server.handshake import Door, read_nonce
from tensortap.wire import keys
from tensortap.wire import messages as wire
from tensortap.wire.address import Address

log = logging.getLogger("tensortap")

_MOST_CREDIT = 256 << 20
_LEAST_CREDIT = 4 << 20
_TURN = 256  # messages in a row, then the rest gets its turn
_FAILED_HANDSHAKE = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

Answer = Callable[["Server", str, dict[str, Any]], bytes]


class Server:
    """Listens, and keeps what arrives in its history."""

    def __init__(
        self,
        address: Address,
        history: History,
        key: bytes,
        *,
        answer: Answer | None = None,
        keep: Callable[[list[Record]], None] | None = None,
    ) -> None:
        self.history = history
        self.started = time.time()
        self.peers: dict[bytes, Peer] = {}  # by the id of the program
        self.door = Door(key)
        self._answer = answer
        self._keep = keep
        self._questions: queue.SimpleQueue[tuple[bytes, wire.Query] | None] = queue.SimpleQueue()
        self._replies: collections.deque[tuple[bytes, list[Any]]] = collections.deque()
        self._routes: dict[bytes, Peer] = {}
        self._fds: dict[int, bytes] = {}
        self._touched: dict[bytes, Peer] = {}
        self._departed: list[tuple[Peer, bytes, float]] = []
        self._pool = Pool(shared=False)
        self._trimmed_at = time.monotonic()
        self._closing = False
        self._context: zmq.Context[Any] = zmq.Context()
        self._zap: zmq.Socket[bytes] | None = None
        self._router = self._bind(address, key)
        endpoint = self._router.get_string(zmq.LAST_ENDPOINT)
        port = int(endpoint.rsplit(":", 1)[1])
        self.address = Address(address.host, port)
        self._bell, self._ringer = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._ringer, False)
        self._thread = threading.Thread(target=self._run, name="tensortap-server", daemon=True)
        self._thread.start()
        threading.Thread(target=self._reply, name="tensortap-answers", daemon=True).start()

    @property
    def rejected(self) -> collections.Counter[str]:
        """How many were refused, by reason."""
        return self.door.refused

    @property
    def alive(self) -> bool:
        """Whether the session listens."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Say goodbye to all clients and stop listening; the history stays."""
        self._closing = True
        self._questions.put(None)
        if self._thread.is_alive():
            self._ring()
            self._thread.join(5)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # rings already, or is closed
            os.write(self._ringer, b"!")

    def _bind(self, address: Address, key: bytes) -> zmq.Socket[bytes]:
        router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.rcvhwm = 0  # credits bound what is under way
        router.sndhwm = 0
        router.rcvbuf = 1 << 20
        router.backlog = 1024
        router.router_mandatory = True
        router.maxmsgsize = wire.LARGEST_MESSAGE
        router.ipv6 = ":" in address.host
        router.set(zmq.HEARTBEAT_IVL, 3000)
        router.set(zmq.HEARTBEAT_TIMEOUT, 15000)
        if not address.loopback:
            self._zap = self.door.open_zap(self._context)
            router.curve_server = True
            router.zap_domain = b"tensortap"
            router.curve_publickey, router.curve_secretkey = keys.curve_pair(key, "server")
        self._monitor = router.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _FAILED_HANDSHAKE
        )
        try:
            router.bind(address.endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise TensortapError(f"cannot listen on {address}: {error}") from None
        return router

    # -- the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        sockets = (self._router, self._monitor, self._bell, self._zap)
        items: list[Any] = [(item, zmq.POLLIN) for item in sockets if item is not None]
        try:
            while not self._closing:
                pause = 10 if self._departed else 100 if self.door.watching else 500
                ready: list[Any] = [item for item, _ in zmq.zmq_poll(items, pause)]
                self._part(self._router not in ready or self._receive())
                if self._zap is not None and self._zap in ready:
                    self.door.vouch(self._zap)
                if self._monitor in ready:
                    self._watch()
                if self._bell in ready:
                    self._pass_replies()
                self._acknowledge()
                self._tidy()
            for route in list(self._routes):
                goodbye = wire.Goodbye("the session was closed")
                self._send(route, wire.message(wire.GOODBYE, goodbye))
        except Exception:
            log.exception("tensortap: the live session ended with an error")
        finally:
            self._router.disable_monitor()
            self._monitor.close(0)
            self._context.destroy(linger=200)
            bell, ringer, self._bell, self._ringer = self._bell, self._ringer, -1, -1
            os.close(bell)
            os.close(ringer)

    def _receive(self) -> bool:
        """Take what has come; False when that was not all."""
        for _ in range(_TURN):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            route = frames[0].bytes
            try:
                self._take(route, frames)
            except WireError as error:
                self._refuse(route, frames[-1], str(error), "spoke garbage")
            except Refused as error:
                reason = "another version" if "upgrade" in str(error) else "wrong key"
                self._refuse(route, frames[-1], str(error), reason)
            except OutOfMemory as error:
                self._refuse(route, frames[-1], str(error), "out of memory")
            except Exception as error:
                # whatever a client sends, the others must not notice
                log.exception("tensortap: a message was refused because of an error")
                self._refuse(route, frames[-1], f"an error in the session: {error!r}", "error")
        return False

    def _take(self, route: bytes, frames: list[zmq.Frame]) -> None:
        if not 3 <= len(frames) <= 4:
            raise WireError(f"a message of {len(frames) - 1} frames")
        kind = frames[1].bytes
        header = wire.read_header(kind, frames[2].buffer)
        data = memoryview(frames[3].buffer) if len(frames) == 4 else memoryview(b"")
        peer = self._routes.get(route)
        if peer is None:
            self._greet(route, header, frames[1])
        elif isinstance(header, wire.Chunk):
            assembly = peer.assemblies.get(header.number)
            if assembly is not None:
                assembly.fill(header, data)
                self._finish(peer)
            elif header.number > peer.last:  # else of a batch that was refused: it goes by
                raise WireError(f"a part of batch {header.number}, of which there is none")
        elif isinstance(header, wire.Batch):
            self._batch(peer, header, data)
        elif isinstance(header, wire.Query):
            self._questions.put((route, header))
        elif isinstance(header, wire.Segments):
            for number in header.dropped:
                peer.mapped.pop(number, None)
        elif kind == wire.GOODBYE:
            self._gone(peer)
        else:
            raise WireError(f"{type(header).__name__} at the wrong time")

    def _tidy(self) -> None:
        self.door.tidy()
        now = time.monotonic()
        if now - self._trimmed_at > 15:
            self._trimmed_at = now
            self._pool.trim(30)

    # -- who is there --------------------------------------------------------------------

    def _greet(self, route: bytes, header: msgspec.Struct, frame: zmq.Frame) -> None:
        if isinstance(header, wire.Hello):
            self._watch()
            self.door.greets(_fd(frame))
            answer = self.door.challenge(route, header)
            self._send(route, wire.message(wire.CHALLENGE, answer))
            return
        if not isinstance(header, wire.Proof):
            raise WireError("a message before the handshake")
        role = self.door.admit(route, header)
        # first what happened before: the descriptor may have been another connection's
        self._watch()
        fd = _fd(frame)
        self.door.leaves(fd)
        peer = self.peers.get(header.client.id)
        if peer is None:
            peer = self.peers[header.client.id] = Peer(header.client, role)
        self._leave(peer)
        nonce = read_nonce(header.arena) if header.arena is not None else None
        peer.connect(route, header, nonce is not None)
        self._routes[route] = peer
        if fd >= 0:
            self._fds[fd] = route
        granted = sum([other.granted for other in self._routes.values()])
        spare = max(0, self.history.bound // 2 - granted)
        peer.granted = max(_LEAST_CREDIT, min(_MOST_CREDIT, spare // 4))
        welcome = wire.Welcome(
            peer.granted, self.history.bound, nonce, sockets.gethostname(), os.getpid()
        )
        self._send(route, wire.message(wire.WELCOME, welcome))

    def _watch(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self.door.enters(event["value"])
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self.door.leaves(event["value"])
                peer = self._routes.get(self._fds.pop(event["value"], b""))
                if peer is not None:
                    self._departed.append((peer, peer.route, time.monotonic()))
            else:
                self.rejected["no handshake"] += 1

    def _part(self, heard_all: bool) -> None:
        """Part from those whose connection has gone, once their last words have been heard."""
        if not self._departed:
            return
        late = time.monotonic() - 1  # among many who talk all the time, not for ever
        waiting = []
        for peer, route, since in self._departed:
            if not heard_all and since > late:
                waiting.append((peer, route, since))
            elif peer.route == route:
                self._gone(peer)
        self._departed = waiting

    def _refuse(self, route: bytes, frame: zmq.Frame, why: str, count: str) -> None:
        self.rejected[count] += 1
        fd = _fd(frame)
        if fd < 0 or self.door.refuses(fd):
            refusal = wire.Refusal(why[:1000], version=__version__)
            self._send(route, wire.message(wire.REFUSED, refusal))
        peer = self._routes.get(route)
        if peer is not None:
            self._gone(peer)

    def _gone(self, peer: Peer) -> None:
        self._leave(peer)
        if peer.role == "viewer":
            self.peers.pop(peer.who.id, None)

    def _leave(self, peer: Peer) -> None:
        self._routes.pop(peer.route, None)
        self._touched.pop(peer.who.id, None)
        peer.disconnect(self._pool)

    # -- records -------------------------------------------------------------------------

    def _batch(self, peer: Peer, batch: wire.Batch, body: memoryview) -> None:
        peer.tally = batch.tally
        for offer in batch.segments:
            self._map(peer, offer)
        if batch.number <= peer.last:  # sent again after a break, but it had arrived
            peer.owed += batch.cost
            peer.freed.extend((e.segment, e.offset) for e in batch.externals if e.segment)
            if batch.number in peer.turned_down:
                peer.refused.append(batch.number)
            self._touched[peer.who.id] = peer
            return
        if peer.assemblies and batch.number <= next(reversed(peer.assemblies)):
            raise WireError("a batch out of order")
        assembly = Assembly(batch, body)

        def slot(external: wire.External) -> Slot:
            mapped = peer.mapped.get(external.segment)
            if mapped is None:
                raise Unreachable
            if external.offset + external.nbytes > mapped.nbytes:
                raise WireError("a payload that goes beyond its segment")
            place = (external.segment, external.offset, external.nbytes)
            return Slot(mapped, *place, peer.freed)

        assembly.allocate(self.history.bound, self._pool, slot)
        peer.assemblies[batch.number] = assembly
        self._finish(peer)

    def _map(self, peer: Peer, offer: wire.SegmentOffer) -> None:
        if peer.arena_pid is None or offer.nbytes <= 0 or offer.number <= 0:
            raise WireError("a segment without an arena")
        try:
            peer.mapped[offer.number] = Mapped(peer.arena_pid, offer.fd, offer.nbytes)
        except (OSError, ValueError, OverflowError) as error:
            # the client hears of it and sends the bytes themselves
            log.debug("tensortap: a segment of %s cannot be read: %s", peer.who, error)

    def _finish(self, peer: Peer) -> None:
        """Take in all batches that are whole, in their order."""
        while peer.assemblies:
            number, assembly = next(iter(peer.assemblies.items()))
            if assembly.missing:
                return
            del peer.assemblies[number]
            if not assembly.refused:
                try:
                    blocks = assembly.blocks
                    records = wire.decode_records(assembly.body, blocks)
                    self.history.write(records)
                    if self._keep is not None:
                        self._keep(records)
                    peer.records += len(records)
                    peer.nbytes += assembly.nbytes
                except WireError as error:
                    log.debug("tensortap: a batch was refused: %s", error)
                    assembly.refused = "spoke garbage"
            if assembly.refused:
                peer.refused.append(number)
                peer.turned_down.append(number)
                self.rejected[assembly.refused] += 1
            peer.last = number
            peer.owed += assembly.batch.cost
            self._touched[peer.who.id] = peer

    def _acknowledge(self) -> None:
        for peer in self._routes.values():
            if peer.freed:
                self._touched[peer.who.id] = peer
        touched, self._touched = self._touched, {}
        for peer in touched.values():
            ack = wire.Ack(peer.last, peer.owed, peer.take_freed(), tuple(peer.refused))
            peer.owed = 0
            peer.refused.clear()
            self._send(peer.route, wire.message(wire.ACK, ack))

    def _send(self, route: bytes, frames: list[Any]) -> None:
        # gone in between: its going is noticed elsewhere
        with contextlib.suppress(zmq.ZMQError):
            self._router.send_multipart([route, *frames])

    # -- questions -----------------------------------------------------------------------

    def _reply(self) -> None:
        """Answer viewers, on a thread of its own: an answer may take long."""
        while (question := self._questions.get()) is not None:
            route, query = question
            body, error = b"", ""
            try:
                if self._answer is None:
                    raise TensortapError("this session answers no questions")
                body = self._answer(self, query.what, query.arguments)
            except TensortapError as problem:
                error = str(problem)
            except Exception as problem:
                log.exception("tensortap: a question could not be answered")
                error = repr(problem)
            reply = wire.message(wire.REPLY, wire.Reply(query.id, error, len(body)))
            self._replies.append((route, [*reply]))
            for chunk in wire.chunks(query.id, wire.BODY, memoryview(body)):
                self._replies.append((route, chunk))
            self._ring()

    def _pass_replies(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._bell, 4096):
                pass
        while self._replies:
            self._send(*self._replies.popleft())


def _fd(frame: zmq.Frame) -> int:
    """The file descriptor of the connection that a frame came over, or -1."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1
