"""Records to a live session, over shared memory on one host and over TCP between hosts."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import zmq
import zmq.utils.garbage  # now: what ends first at exit is what was imported last

from tensortap.buffers import Lease, OutOfMemory, Pool, Segment
from tensortap.limits import format_size
from tensortap.pipeline.queue import Entry, Wake
from tensortap.pipeline.ticket import settle
from tensortap.record import Kind
from tensortap.wire import messages as wire
from tensortap.wire.address import Address
from tensortap.wire.channel import NO_KEY, Channel, ConnectionState

log = logging.getLogger("tensortap")

_LARGEST_BODY = 256 << 10  # a batch of small records is cut here
_PATIENCE = 30.0  # seconds that unsent records wait for a server that went away
_TRIM = 30.0  # seconds after which unused memory goes back
_NONCE_SEGMENT = 4096


class Flight(NamedTuple):
    """A batch that was sent and is not acknowledged yet."""

    body: bytes
    blocks: list[Any]
    entries: list[Entry]
    nbytes: int


class Live:
    """The drain that sends to one server."""

    def __init__(
        self,
        address: Address,
        pool: Pool,
        *,
        client: Callable[[], wire.Client],
        tally: Callable[[], wire.Tally] = wire.Tally,
        on_state: Callable[[bool], None] = lambda forget: None,
        on_refused: Callable[[int], None] = lambda count: None,
        arena: bool = True,
        key: bytes | None = None,
    ) -> None:
        self.address = address  # port 0: not known yet, it is set when it is
        self._key = key
        self.accepting = True  # until it is known that nobody listens
        self._pool = pool
        self._client, self._tally = client, tally
        self._on_state, self._on_refused = on_state, on_refused
        self._want_arena = arena and pool.shared
        self._arena = False
        self._nonce = secrets.token_bytes(16)
        self._nonce_segment: Segment | None = None
        self._context: zmq.Context[Any] | None = None
        self._channel: Channel | None = None
        self._state = ConnectionState.SEEKING
        self._credit = 0
        self._largest = 0
        self._number = 0
        self._flights: dict[int, Flight] = {}
        self.pending = 0
        self._in_arena: set[int] = set()  # flights whose bytes lie in shared memory
        self._too_large: set[str] = set()  # names of which it was said
        self._lent: dict[tuple[int, int], Lease] = {}
        self._offered: dict[int, Segment] = {}
        self._lost_at: float | None = None
        self._trimmed_at = 0.0
        self._lock = threading.Lock()  # flights are given up from another thread

    # -- what the background queue asks --------------------------------------------------

    def room(self) -> int:
        if self._state is not ConnectionState.OPEN:
            return 0
        # a value larger than all credit goes when nothing else is under way
        return max(self._credit, 0) if self._flights else self._largest + (1 << 20)

    def describe(self) -> str:
        """The state of the connection in words."""
        if self._state is ConnectionState.OPEN:
            return "connected, through shared memory" if self._arena else "connected, over TCP"
        refusal = self._channel.refusal if self._channel is not None else ""
        return f"none: {refusal or 'nobody listens'}"

    def send(self, entries: list[Entry]) -> None:
        batch: list[Entry] = []
        nbytes = 0
        for entry in entries:
            if entry[2] > self._largest:
                self._turn_down(entry)
                continue
            # together they must not be more than the session can hold
            if batch and (nbytes > _LARGEST_BODY or nbytes + entry[2] > self._largest):
                self._send(batch)
                batch, nbytes = [], 0
            batch.append(entry)
            nbytes += entry[2]
        if batch:
            self._send(batch)

    def _turn_down(self, entry: Entry) -> None:
        """Do not even send what the session could never hold."""
        record, _, nbytes = entry
        if record.name not in self._too_large:
            self._too_large.add(record.name)
            sizes = f"{format_size(nbytes)}, and the session holds {format_size(self._largest)}"
            log.warning("tensortap: %r was not sent: it has %s", record.name, sizes)
        self._on_refused(1)
        settle([entry], False)

    def wait(self, wake: Wake, timeout: float) -> None:
        if not self.address.port:
            wake.wait(timeout)
            return
        channel = self._channel or self._start()
        messages = channel.poll(timeout, wake.fileno())
        wake.clear()
        for kind, header, _ in messages:
            self._handle(kind, header)
        if channel.state is not self._state:
            self._turn(channel)
        now = time.monotonic()
        if self._lost_at is not None and now - self._lost_at > _PATIENCE:
            self._lost_at = None
        if self._state is ConnectionState.ABSENT and self._lost_at is None:
            # again and again: a value may have been queued just when nobody was found
            self._on_state(True)
        if now - self._trimmed_at > _TRIM / 2:
            self._trimmed_at = now
            self._trim()

    def hurry(self) -> None:
        """What was sent is under way already."""

    def missed(self, name: str, kind: Kind, step: int, rank: int) -> None:
        """The counts that go with every batch say enough."""

    def give_up(self) -> list[Entry]:
        with self._lock:
            lost = [entry for flight in self._flights.values() for entry in flight.entries]
            self._flights.clear()
            self.pending = 0
        return lost

    def close(self) -> None:
        channel = self._channel
        if channel is not None:
            if channel.state is ConnectionState.OPEN:
                self._report()
                channel.send(wire.message(wire.GOODBYE, wire.Goodbye("the program ended")))
            channel.close(linger=500)
        if self._context is not None:
            # not term(): it would wait for the peer, and the program wants to leave
            with contextlib.suppress(zmq.ZMQError):
                self._context.destroy(linger=500)
        if self._nonce_segment is not None:
            self._nonce_segment.close()

    # -- the connection ------------------------------------------------------------------

    def _start(self) -> Channel:
        self._context = zmq.Context()
        self._channel = Channel(self.address, "source", self._context, self._key)
        self._introduce(self._channel)
        return self._channel

    def _introduce(self, channel: Channel) -> None:
        offer = None
        if self._want_arena and self._nonce_segment is None:
            with contextlib.suppress(OSError):
                segment = Segment(0, _NONCE_SEGMENT, shared=True)
                segment.memory[: len(self._nonce)] = self._nonce
                self._nonce_segment = segment
        client = self._client()
        if self._nonce_segment is not None:
            offer = wire.Arena(client.pid, self._nonce_segment.fd)
        channel.proof = wire.Proof(b"", client, offer)

    def _turn(self, channel: Channel) -> None:
        """The connection has come or gone."""
        before, self._state = self._state, channel.state
        if channel.state is ConnectionState.OPEN:
            welcome = channel.welcome
            assert welcome is not None
            self._arena = welcome.nonce == self._nonce
            self._credit = welcome.credit
            self._largest = welcome.largest
            self._offered.clear()
            self._lost_at = None
            self.accepting = True
            with self._lock:
                flights = list(self._flights.items())
            for number, flight in flights:
                self._transmit(number, flight)
            self._report()
            self._on_state(False)
            return
        self.accepting = False
        self._introduce(channel)
        if before is ConnectionState.OPEN:
            self._abandon()
            self._lost_at = time.monotonic()
            self._on_state(False)
        else:
            # whoever has never served has no key: nothing is wrong
            if channel.refusal not in ("", NO_KEY) or not self.address.loopback:
                why = channel.refusal or "nobody listens there"
                log.warning("tensortap: no live session at %s: %s", self.address, why)
            self._on_state(True)

    def _abandon(self) -> None:
        """Never write again into memory that the server we lost may still be showing."""
        lent = {lease.segment.number: lease.segment for lease in self._lent.values()}
        for segment in lent.values():
            self._pool.retire(segment)
        self._lent.clear()
        self._in_arena.clear()
        self._offered.clear()
        self._pool.trim(
            _TRIM
        )  # what was lent goes back now, not when somebody next asks for memory

    def _trim(self) -> None:
        self._pool.trim(_TRIM)
        gone = [number for number, segment in self._offered.items() if segment.fd < 0]
        for number in gone:
            del self._offered[number]
        if gone and self._state is ConnectionState.OPEN:
            assert self._channel is not None
            self._channel.send(wire.message(wire.SEGMENTS, wire.Segments(tuple(gone))))

    def _handle(self, kind: bytes, header: Any) -> None:
        if isinstance(header, wire.Ack):
            self._acknowledge(header)

    def _acknowledge(self, ack: wire.Ack) -> None:
        self._credit += ack.credit
        for place in ack.freed:
            self._lent.pop(place, None)
        settled: list[tuple[int, Flight]] = []
        with self._lock:
            for number in list(self._flights):
                if number > ack.number:
                    break
                flight = self._flights.pop(number)
                self.pending -= flight.nbytes
                settled.append((number, flight))
        for number, flight in settled:
            arrived = number not in ack.rejected
            if not arrived and number in self._in_arena and flight.nbytes <= self._largest:
                # the server cannot read the arena after all: from here on over the socket
                self._arena = False
                for block in flight.blocks:
                    if isinstance(block, Lease):
                        self._lent.pop((block.segment.number, block.offset), None)
                self._launch(flight)
            else:
                if not arrived:
                    self._on_refused(len(flight.entries))
                settle(flight.entries, arrived)
            self._in_arena.discard(number)

    # -- batches -------------------------------------------------------------------------

    def _send(self, entries: list[Entry]) -> None:
        blocks: list[Any] = []

        def external(block: Any) -> int:
            blocks.append(self._housed(block))
            return len(blocks) - 1

        try:
            body = wire.encode_records([record for record, _, _ in entries], external)
        except Exception as error:
            if len(entries) > 1:  # one value that failed must not take the others with it
                for entry in entries:
                    self._send([entry])
                return
            log.warning("tensortap: %r could not be sent: %s", entries[0][0].name, error)
            self._on_refused(1)
            settle(entries, False)
            return
        self._launch(Flight(body, blocks, entries, sum([nbytes for _, _, nbytes in entries])))

    def _launch(self, flight: Flight) -> None:
        self._number += 1
        with self._lock:
            self._flights[self._number] = flight
            self.pending += flight.nbytes
        self._transmit(self._number, flight)

    def _housed(self, block: Any) -> Any:
        """The block with its bytes there, in the arena if there is one."""
        if isinstance(block, Lease):
            block.settle()
            return block
        view: memoryview = block.view
        if self._arena:
            with contextlib.suppress(OutOfMemory):
                lease = self._pool.acquire(view.nbytes)
                lease.writable[:] = view
                return lease
        return block

    def _transmit(self, number: int, flight: Flight) -> None:
        channel = self._channel
        assert channel is not None
        externals: list[wire.External] = []
        offers: list[wire.SegmentOffer] = []
        for block in flight.blocks:
            if self._arena and isinstance(block, Lease) and block.segment.fd >= 0:
                segment = block.segment
                if segment.number not in self._offered:
                    self._offered[segment.number] = segment
                    offers.append(wire.SegmentOffer(segment.number, segment.fd, segment.nbytes))
                externals.append(wire.External(segment.number, block.offset, block.nbytes))
                self._lent[segment.number, block.offset] = block
                self._in_arena.add(number)
            else:
                externals.append(wire.External(0, 0, block.nbytes))
        nbytes = len(flight.body)
        places, offered = tuple(externals), tuple(offers)
        header = wire.Batch(number, nbytes, flight.nbytes, places, offered, self._tally())
        self._credit -= flight.nbytes
        frames: list[Any] = wire.message(wire.RECORDS, header)
        whole = nbytes <= wire.CHUNK_NBYTES
        channel.send([*frames, flight.body if whole else b""])
        if not whole:
            self._send_parts(channel, number, wire.BODY, memoryview(flight.body))
        for index, (place, block) in enumerate(zip(externals, flight.blocks, strict=True)):
            if not place.segment:
                self._send_parts(channel, number, index, block.view)

    def _send_parts(self, channel: Channel, number: int, index: int, view: memoryview) -> None:
        for frames in wire.chunks(number, index, view):
            channel.send(frames, copy=False)

    def _report(self) -> None:
        """Tell the final counts: what was dropped must not be forgotten on the way out."""
        assert self._channel is not None
        self._number += 1
        header = wire.Batch(self._number, 1, 0, tally=self._tally())
        self._channel.send([*wire.message(wire.RECORDS, header), b"\x90"])
