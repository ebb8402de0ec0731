"""Clients, their connections and the batches that are arriving, as the server sees them."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.core.buffers import MappedSegment
from tensortap.core.errors import WireError
from tensortap.core.limits import has_room
from tensortap.live import messages as wire

log = logging.getLogger("tensortap")


class Assembly:
    """Puts a batch together; it is complete when `missing` is 0.

    `rejected` is the reason why the batch cannot be stored: its chunks are ignored then.
    """

    def __init__(self, batch: wire.Batch, body: memoryview) -> None:
        shared = batch.shared_body
        in_chunks = shared is None and len(body) != batch.body_nbytes
        if shared is not None:
            wrong = len(body) > 0 or shared.nbytes != batch.body_nbytes
        else:
            wrong = in_chunks and (len(body) > 0 or batch.body_nbytes <= wire.CHUNK_NBYTES)
        if wrong:
            raise WireError(f"announced {batch.body_nbytes} bytes of records, sent {len(body)}")
        self.batch = batch
        self.nbytes = batch.body_nbytes + sum([e.nbytes for e in batch.externals])
        self.missing = batch.body_nbytes if in_chunks else 0
        self.rejected = ""
        self.body: Any = b"" if in_chunks else bytes(body)
        self.payloads: list[Any] = []
        self._body_in_chunks = in_chunks
        self._filled: collections.Counter[int] = collections.Counter()

    def allocate(
        self,
        bound: int,
        shared_bytes: Callable[[wire.External], memoryview | None],
        empty: Callable[[int], NDArray[np.uint8]],
    ) -> None:
        """Copy the payloads in shared memory, and allocate memory for those that follow."""
        # the objects around a payload take at most 1 KiB; 1 MiB of them is fine for any bound
        overhead = 1024 * len(self.batch.externals)
        if self.nbytes > bound or overhead > max(bound, 1 << 20):
            self._reject("too large")
            return
        # reading how much is free takes longer than to store a small batch
        if self.nbytes > 16 << 20 and not has_room(self.nbytes):
            self._reject("out of memory")
            return
        if self.missing:
            self.body = bytearray(self.batch.body_nbytes)
        elif self.batch.shared_body is not None:
            shared = shared_bytes(self.batch.shared_body)
            if shared is None:
                self._reject("unreadable segment")
                return
            self.body = bytes(shared)  # before it is decoded: the client can still write there
        for external in self.batch.externals:
            memory = empty(external.nbytes)
            if not external.segment:
                self.missing += external.nbytes
            elif (shared := shared_bytes(external)) is not None:
                np.copyto(memory, np.frombuffer(shared, np.uint8))  # releases the GIL
            else:
                self._reject("unreadable segment")
                return
            self.payloads.append(memory.data)

    def _reject(self, reason: str) -> None:
        self.rejected = reason
        self.missing = 0
        self.payloads = []

    def fill(self, chunk: wire.Chunk, data: memoryview) -> None:
        """Copy a chunk to its place; raise WireError if it does not belong there."""
        if self.rejected:
            return
        if chunk.index == wire.BODY and self._body_in_chunks:
            target = memoryview(self.body)
        elif 0 <= chunk.index < len(self.payloads):
            if self.batch.externals[chunk.index].segment:
                raise WireError("a chunk of a payload in a segment")
            target = self.payloads[chunk.index]
        else:
            raise WireError(f"a chunk of payload {chunk.index}, which does not exist")
        # in order and without overlap: no byte may keep its old content
        if chunk.offset != self._filled[chunk.index]:
            raise WireError("a chunk out of order")
        end = chunk.offset + data.nbytes
        if end > target.nbytes:
            raise WireError("a chunk beyond the end of its payload")
        target[chunk.offset : end] = data
        self._filled[chunk.index] = end
        self.missing -= data.nbytes


class ClientState:
    """The state of a program, kept when the program disconnects."""

    def __init__(self, info: wire.Client, role: str) -> None:
        self.info = info
        self.role = role
        self.connection: Connection | None = None
        self.records = 0
        self.nbytes = 0
        self.dropped: dict[str, int] = {}  # values that it did not send, by reason
        self.answer = 0, b""  # to the last CONTROL: its number, a `ProbeAnswer`
        # after a reconnect the client sends unacknowledged batches again
        self.last_batch = 0
        self.rejected_batches: collections.deque[int] = collections.deque(maxlen=1000)

    @property
    def connected(self) -> bool:
        return self.connection is not None


class Connection:
    """One connection of a client: its credit, its segments, and the batches it is sending."""

    def __init__(self, client: ClientState, route: bytes, arena_pid: int | None) -> None:
        self.client = client
        self.route = route
        self.arena_pid = arena_pid  # of the process whose segments can be mapped
        self.credit = 0
        self.silent_rounds = 0  # of receiving since its last message
        self.assemblies: collections.OrderedDict[int, Assembly] = collections.OrderedDict()
        self._segments: dict[int, MappedSegment] = {}
        self._used_credit = 0
        self._rejected: list[int] = []
        self._ack_due = False

    # -- receiving -----------------------------------------------------------------------

    def start_batch(
        self,
        batch: wire.Batch,
        body: memoryview,
        bound: int,
        empty: Callable[[int], NDArray[np.uint8]],
    ) -> None:
        """Begin to receive a batch; raise WireError if it is malformed."""
        client = self.client
        client.dropped = batch.dropped
        for offer in batch.segments:
            self._map(offer)
        if batch.number <= client.last_batch:  # sent again, although it had arrived
            self._settle(batch, rejected=batch.number in client.rejected_batches)
            return
        if self.assemblies and batch.number <= next(reversed(self.assemblies)):
            raise WireError("a batch out of order")
        assembly = Assembly(batch, body)
        assembly.allocate(bound, self._shared_bytes, empty)
        self.assemblies[batch.number] = assembly

    def add_chunk(self, chunk: wire.Chunk, data: memoryview) -> None:
        assembly = self.assemblies.get(chunk.number)
        if assembly is not None:
            assembly.fill(chunk, data)
        elif chunk.number > self.client.last_batch:
            raise WireError(f"a chunk of batch {chunk.number}, which does not exist")

    def completed(self) -> Iterator[Assembly]:
        """Yield complete batches in order; each has to be passed to `finish`."""
        while self.assemblies:
            number, assembly = next(iter(self.assemblies.items()))
            if assembly.missing:
                return
            del self.assemblies[number]
            yield assembly

    def finish(self, assembly: Assembly, records: int, *, rejected: bool) -> None:
        """Note that a batch was stored, or rejected."""
        client = self.client
        client.last_batch = assembly.batch.number
        if rejected:
            client.rejected_batches.append(client.last_batch)
        else:
            client.records += records
            client.nbytes += assembly.nbytes
        self._settle(assembly.batch, rejected)

    def _settle(self, batch: wire.Batch, rejected: bool) -> None:
        self._used_credit += batch.cost
        if rejected:
            self._rejected.append(batch.number)
        self._ack_due = True

    def take_ack(self) -> wire.Ack | None:
        """Return the acknowledgement to send now, if one is due."""
        if not self._ack_due:
            return None
        rejected, self._rejected = tuple(self._rejected), []
        credit, self._used_credit = self._used_credit, 0
        self._ack_due = False
        return wire.Ack(self.client.last_batch, credit, rejected)

    # -- shared memory -------------------------------------------------------------------

    def _map(self, offer: wire.SegmentOffer) -> None:
        if self.arena_pid is None:
            raise WireError("a segment without an arena")
        try:
            segment = MappedSegment(self.arena_pid, offer.fd, offer.nbytes)
        except (OSError, ValueError, OverflowError) as error:
            # its batches are rejected, and the client sends the bytes over the socket
            log.debug("tensortap: cannot map a segment of %s: %s", self.client.info, error)
        else:
            self._segments[offer.number] = segment
            # a client has one arena, and a new one after it was disconnected
            while len(self._segments) > 4:
                del self._segments[next(iter(self._segments))]

    def _shared_bytes(self, external: wire.External) -> memoryview | None:
        segment = self._segments.get(external.segment)
        if segment is None:
            return None
        end = external.offset + external.nbytes
        if end > segment.nbytes:
            raise WireError("a payload beyond the end of its segment")
        return segment.memory[external.offset : end]

    def close(self) -> None:
        self.client.connection = None
        self.assemblies.clear()
        self._segments.clear()
