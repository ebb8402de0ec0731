"""The sink that sends records to a live session, over shared memory on one host, else over TCP."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from tensortap.capture.fast import RecordBlock
from tensortap.capture.ledger import ERROR, TOO_LARGE, Entry, Ledger, single
from tensortap.capture.queue import columns_of, entries_of
from tensortap.capture.sink import Sink, Wake
from tensortap.capture.ticket import settle
from tensortap.core import ranks
from tensortap.core.buffers import Lease, Pool, Segment, view_of
from tensortap.core.columns import Column
from tensortap.core.limits import format_size
from tensortap.core.probes import probes
from tensortap.live import messages as wire
from tensortap.live.address import Address
from tensortap.live.channel import NO_KEY, Channel, ConnectionState
from tensortap.values.protocol import SMALL

log = logging.getLogger("tensortap")

_MOST_BLOCKS = 32 << 10  # of a batch; the header names each, in at most 28 bytes


class Lender:
    """Lends blocks of the arena to one server, until it has acknowledged their batch."""

    def __init__(self, pool: Pool, *, wanted: bool) -> None:
        self.active = False  # whether the server can read our memory
        self.pool = pool
        self._wanted = wanted and pool.shared
        self._nonce = secrets.token_bytes(16)
        self._nonce_segment: Segment | None = None
        self._offered: set[int] = set()  # numbers of the segments that the server knows

    def introduce(self) -> wire.Arena | None:
        """Return a segment with a nonce that only a server on this host can read."""
        if self._wanted and self._nonce_segment is None:
            with contextlib.suppress(OSError):
                segment = Segment(0, 4096, shared=True)
                segment.memory[: len(self._nonce)] = self._nonce
                self._nonce_segment = segment
        if self._nonce_segment is None:
            return None
        return wire.Arena(os.getpid(), self._nonce_segment.fd)

    def open(self, nonce: bytes | None) -> None:
        """Begin a connection with a server that has read this nonce."""
        self.active = nonce == self._nonce
        self._offered.clear()
        if self.active:
            self.pool.prepare()

    def in_place(self, block: Any, wait: Callable[[], bool]) -> Any:
        """Return the block with its bytes complete, in the arena if it gets room.

        `wait` waits until the server has returned blocks; it returns False if there is no hope.
        """
        view: memoryview = block.view
        if not self.active or (isinstance(block, Lease) and block.segment.number):
            return block
        copy = self._copy(view)
        if copy is None and self.pool.extend(view.nbytes):
            copy = self._copy(view)
        if copy is None and view.nbytes <= self.pool.nbytes:
            # encryption would take far longer, and new snapshots must not take all that returns
            self.pool.arena_is_wanted = True
            try:
                while copy is None and wait():
                    copy = self._copy(view)
            finally:
                self.pool.arena_is_wanted = False
        return block if copy is None else copy

    def place_body(self, body: bytes) -> bytes | Lease:
        """Return the body of a batch in the arena, unless it is small: sockets encrypt it.

        Blocks of the arena have whole pages.
        """
        return (len(body) >= 4096 and self._copy(memoryview(body))) or body

    def place_block(self, block: RecordBlock) -> memoryview | Lease:
        """Return rows and payloads of a block, in the arena unless they are few."""
        nbytes = block.nbytes
        shared = self.active and nbytes >= 4096
        lease = self.pool.acquire_shared(nbytes) if shared else None
        body = memoryview(bytearray(nbytes)) if lease is None else lease.writable
        block.move(body)
        return body if lease is None else lease

    def _copy(self, view: memoryview) -> Lease | None:
        lease = self.pool.acquire_shared(view.nbytes) if self.active else None
        if lease is not None:
            if view.readonly:
                lease.writable[:] = view
            else:  # releases the GIL
                source = ctypes.addressof(ctypes.c_char.from_buffer(view))
                ctypes.memmove(lease.address, source, view.nbytes)
        return lease

    def lend(self, block: Any, offers: list[wire.SegmentOffer]) -> wire.External:
        """Return where the server finds a block; segment 0 if its bytes have to be sent."""
        segment = block.segment if self.active and isinstance(block, Lease) else None
        if segment is None or segment.fd < 0:
            return wire.External(0, 0, block.nbytes)
        if segment.number not in self._offered:
            self._offered.add(segment.number)
            offers.append(wire.SegmentOffer(segment.number, segment.fd, segment.nbytes))
        return wire.External(segment.number, block.offset, block.nbytes)

    def abandon(self) -> None:
        """Never write again into memory that a server which was given up may still read."""
        if self.active:
            self.pool.renew()


class Flight(NamedTuple):
    """A batch that was sent and is not acknowledged yet."""

    body: bytes | memoryview | Lease
    blocks: list[Any]
    entries: Sequence[Entry | RecordBlock]
    nbytes: int
    columns: tuple[Column, ...] = ()  # of a block of small records
    rows: int = 0  # how many these are


class LiveSink(Sink):
    """Sends records to one server."""

    accepting = True  # until it is known that nobody listens
    pending = 0
    takes_blocks = True

    def __init__(
        self,
        address: Address,
        pool: Pool,
        ledger: Ledger,
        *,
        arena: bool = True,
        key: bytes | None = None,
        step: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._step = step  # returns the current one
        self.address = address  # port 0: not known yet, the owner sets it later
        self.ledger = ledger
        self.arena = Lender(pool, wanted=arena)
        self.id = os.urandom(16)
        self._key = key
        self._channel: Channel | None = None
        self._state = ConnectionState.SEEKING
        self._credit = 0
        self._largest = 0
        self._number = 0
        # without a lock, although another thread may give them up: whoever pops one settles it
        self._flights: dict[int, Flight] = {}
        self._in_arena: set[int] = set()  # flights whose bytes are in shared memory
        self._too_large: set[str] = set()  # names for which a warning was logged
        self._lost_at: float | None = None
        self._report_state()

    # -- what the queue calls -------------------------------------------------------------

    @property
    def unreachable(self) -> bool:
        return self._state is ConnectionState.ABSENT and self._lost_at is None

    @property
    def connected(self) -> bool:
        return self._state is ConnectionState.OPEN

    def room(self) -> int:
        if not self.connected:
            return 0
        # a value larger than all credit is sent while nothing else is in flight
        return max(self._credit, 0) if self._flights else self._largest + (1 << 20)

    def send(self, entries: Sequence[Entry | RecordBlock]) -> None:
        batch: list[Entry] = []
        nbytes = body = 0
        for entry in entries:
            if not isinstance(entry, tuple):
                if batch:
                    self._send(batch)
                    batch, nbytes, body = [], 0, 0
                self._send_block(entry)
                continue
            if entry[2] > self._largest:
                self._drop_too_large(entry)
                continue
            # a batch must not be larger than what the session can hold
            most = min(4 << 20, self._largest)
            if batch and (body > 256 << 10 or nbytes + entry[2] > most):
                self._send(batch)
                batch, nbytes, body = [], 0, 0
            batch.append(entry)
            nbytes += entry[2]
            # large payloads in the arena are not in the body; a slow connection confirms one by one
            body += min(entry[2], SMALL) if self.arena.active else entry[2]
        if batch:
            self._send(batch)

    def wait(self, wake: Wake, timeout: float) -> None:
        if not self.address.port:
            wake.wait(timeout)
            return
        if self._channel is None:
            self._channel = Channel(self.address, self._hello(), self._key)
        channel = self._channel
        self._receive(channel, timeout, wake.fileno())
        wake.clear()
        if channel.state is not self._state:
            self._change_state(channel)
        self._report_state()
        self.arena.pool.tidy()
        # unsent records wait 30 s for a server that went away
        if self._lost_at is not None and time.monotonic() - self._lost_at > 30:
            self._lost_at = None

    def give_up(self) -> list[Entry]:
        lost: list[Entry] = []
        for number in list(self._flights):
            flight = self._flights.pop(number, None)
            if flight is not None:
                lost += single(flight.entries)
                self.pending -= flight.nbytes
        if lost:
            self.arena.abandon()
        return lost

    def close(self) -> None:
        channel = self._channel
        if channel is not None:
            if channel.state is ConnectionState.OPEN:
                self._report_dropped(channel)
                channel.send(wire.message(wire.GOODBYE, wire.Goodbye()))
            channel.end(linger=500)

    # -- the connection -------------------------------------------------------------------

    def _hello(self) -> wire.Hello:
        rank, world_size = ranks.rank_and_world_size()
        host = os.uname().nodename
        client = wire.Client(self.id, host, os.getpid(), rank, world_size, _program())
        return wire.hello("source", client, self.arena.introduce())

    def _report_state(self) -> None:
        if self._state is ConnectionState.OPEN:
            way = "through shared memory" if self.arena.active else "over TCP"
            state = f"connected, {way}"
        else:
            refusal = self._channel.refusal if self._channel is not None else ""
            state = f"none: {refusal or 'nobody listens'}"
        self.ledger.sessions[str(self.address)] = state

    def _change_state(self, channel: Channel) -> None:
        before, self._state = self._state, channel.state
        if channel.state is ConnectionState.OPEN:
            welcome = channel.welcome
            assert welcome is not None
            self.arena.open(welcome.nonce)
            self._in_arena.clear()
            self._credit = welcome.credit
            self._largest = welcome.largest
            self._lost_at = None
            self.accepting = True
            for number, flight in list(self._flights.items()):
                self._transmit(channel, number, flight)
            self._report_dropped(channel)
            return
        self.accepting = False
        channel.hello = self._hello()
        if before is ConnectionState.OPEN:
            self._lost_at = time.monotonic()
        # a user who has never served has no key: nothing is wrong
        elif channel.refusal not in ("", NO_KEY) or not self.address.loopback:
            why = channel.refusal or "nobody listens there"
            log.warning("tensortap: no live session at %s: %s", self.address, why)

    def _receive(self, channel: Channel, timeout: float, wake: int | None = None) -> None:
        for _, header, _ in channel.poll(timeout, wake):
            if isinstance(header, wire.Ack):
                self._acknowledge(header)
            elif isinstance(header, wire.Control):
                answer = probes.receive(header.request, header.pattern, self._step())
                state = wire.message(wire.STATE, wire.State(header.number))
                channel.send([*state, msgspec.msgpack.encode(answer)])

    def _await_blocks(self) -> bool:
        """Wait until the server returns blocks of the arena; return False if it does not."""
        channel = self._channel
        waiting = len(self._in_arena)
        deadline = time.monotonic() + 0.5
        while waiting and len(self._in_arena) == waiting:
            left = deadline - time.monotonic()
            if channel is None or channel.state is not ConnectionState.OPEN or left <= 0:
                return False
            self._receive(channel, left)
        return waiting > 0

    def _acknowledge(self, ack: wire.Ack) -> None:
        self._credit += ack.credit
        for number in [number for number in list(self._flights) if number <= ack.number]:
            flight = self._flights.pop(number, None)
            if flight is None:
                continue
            if number not in ack.rejected:
                settle(flight.entries, True)
            elif flight.nbytes > self._largest:
                self.ledger.drop(flight.entries, TOO_LARGE)
            elif number in self._in_arena:  # use the socket from now on
                self.arena.active = False
                self._launch(flight)
            else:
                self.ledger.drop(flight.entries, ERROR)
            self._in_arena.discard(number)
            # only now: a flush that finds nothing pending must find the drops counted
            self.pending -= flight.nbytes

    # -- batches --------------------------------------------------------------------------

    def _drop_too_large(self, entry: Entry) -> None:
        record, _, nbytes = entry
        if record.name not in self._too_large:
            self._too_large.add(record.name)
            log.warning(
                "tensortap: %r was not sent: it has %s, and the session can hold %s",
                record.name, format_size(nbytes), format_size(self._largest),
            )  # fmt: skip
        self.ledger.drop([entry], TOO_LARGE)

    def _send(self, entries: list[Entry]) -> None:
        blocks: list[Any] = []

        def external(block: Any) -> int | bytes:
            if len(blocks) == _MOST_BLOCKS:
                return bytes(block.view)
            blocks.append(self.arena.in_place(block, self._await_blocks))
            return len(blocks) - 1

        try:
            body = wire.encode_records([record for record, _, _ in entries], external)
        except Exception as error:
            if len(entries) > 1:  # one bad value must not take the others with it
                for entry in entries:
                    self._send([entry])
                return
            log.warning("tensortap: %r could not be sent: %s", entries[0][0].name, error)
            self.ledger.drop(entries, ERROR)
            return
        nbytes = sum([nbytes for _, _, nbytes in entries])
        self._launch(Flight(self.arena.place_body(body), blocks, entries, nbytes))

    def _send_block(self, block: RecordBlock) -> None:
        if not len(block):  # an error kept its first record out
            return
        names = sum([len(column[0]) for column in block.columns])
        # the session can hold some of the records; a body has room for names that a header has not
        if block.weight > self._largest or names > 128 << 10:
            self.send(entries_of(block))
            return
        body = self.arena.place_block(block)
        self._launch(Flight(body, [], [block], block.weight, columns_of(block), len(block)))

    def _launch(self, flight: Flight) -> None:
        self._number += 1
        self.pending += flight.nbytes
        self._flights[self._number] = flight
        assert self._channel is not None
        if self._channel.state is ConnectionState.OPEN:  # else when it is open again
            self._transmit(self._channel, self._number, flight)

    def _transmit(self, channel: Channel, number: int, flight: Flight) -> None:
        offers: list[wire.SegmentOffer] = []
        externals = tuple([self.arena.lend(block, offers) for block in flight.blocks])
        view = view_of(flight.body)
        body = self.arena.lend(flight.body, offers) if isinstance(flight.body, Lease) else None
        shared = body is not None and body.segment > 0
        if shared or any(external.segment for external in externals):
            self._in_arena.add(number)
        header = wire.Batch(
            number, view.nbytes, flight.nbytes, externals, tuple(offers), self.ledger.reasons(),
            body if shared else None, flight.columns, flight.rows,
        )  # fmt: skip
        self._credit -= flight.nbytes
        whole = not shared and view.nbytes <= wire.CHUNK_NBYTES
        channel.send([*wire.message(wire.RECORDS, header), bytes(view) if whole else b""])
        parts = [] if whole or shared else [(wire.BODY, view)]
        for index, (external, block) in enumerate(zip(externals, flight.blocks, strict=True)):
            if not external.segment:
                parts.append((index, block.view))
        for index, view in parts:
            for frames in wire.chunks(number, index, view):
                channel.send(frames, copy=False)

    def _report_dropped(self, channel: Channel) -> None:
        """Send the current counts of dropped values in a batch without records."""
        self._number += 1
        header = wire.Batch(self._number, 1, 0, dropped=self.ledger.reasons())
        channel.send([*wire.message(wire.RECORDS, header), b"\x90"])


def _program() -> str:
    """Return the path of the program, by which a session accepts it."""
    script = getattr(sys.modules.get("__main__"), "__file__", None) or next(iter(sys.argv), "")
    try:
        return os.path.abspath(script or "python")  # as if in the working folder
    except OSError:  # which was deleted
        return str(script)
