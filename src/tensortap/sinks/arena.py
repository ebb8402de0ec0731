"""Memory that a sink lends to the server on the same host, instead of sending its bytes."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable
from typing import Any

from tensortap.buffers import Lease, OutOfMemory, Pool, Segment
from tensortap.wire import messages as wire

_NONCE_SEGMENT = 4096
_TRIM = 30.0  # seconds after which unused memory is released


class Lender:
    """Lends blocks of a pool to one server, at most `limit` bytes at a time."""

    def __init__(self, pool: Pool, *, wanted: bool, limit: int) -> None:
        self.active = False  # whether the server can read our memory
        self._pool = pool
        self._wanted = wanted and pool.shared
        self._limit = limit
        self._nbytes = 0
        self._nonce = secrets.token_bytes(16)
        self._nonce_segment: Segment | None = None
        self._lent: dict[tuple[int, int], Lease] = {}
        self._offered: dict[int, Segment] = {}

    def __len__(self) -> int:
        return len(self._lent)

    def introduce(self) -> wire.Arena | None:
        """Return a segment with a nonce that only a server on this host can read."""
        if self._wanted and self._nonce_segment is None:
            with contextlib.suppress(OSError):
                segment = Segment(0, _NONCE_SEGMENT, shared=True)
                segment.memory[: len(self._nonce)] = self._nonce
                self._nonce_segment = segment
        if self._nonce_segment is None:
            return None
        return wire.Arena(os.getpid(), self._nonce_segment.fd)

    def open(self, nonce: bytes | None) -> None:
        """Begin a connection with a server that has read this nonce."""
        self.active = nonce == self._nonce
        self._offered.clear()

    def in_place(self, block: Any) -> Any:
        """Return the block with its bytes complete, in memory that can be lent if possible."""
        if isinstance(block, Lease):
            block.settle()
            return block
        view: memoryview = block.view
        if self.active:
            with contextlib.suppress(OutOfMemory):
                lease = self._pool.acquire(view.nbytes)
                lease.writable[:] = view
                return lease
        return block

    def lend(self, block: Any, offers: list[wire.SegmentOffer]) -> wire.External:
        """Return where the server finds a block; segment 0 if its bytes have to be sent."""
        segment = block.segment if self.active and isinstance(block, Lease) else None
        if segment is None or segment.fd < 0 or self._nbytes + block.nbytes > self._limit:
            return wire.External(0, 0, block.nbytes)
        if segment.number not in self._offered:
            self._offered[segment.number] = segment
            offers.append(wire.SegmentOffer(segment.number, segment.fd, segment.nbytes))
        self._lent[segment.number, block.offset] = block
        self._nbytes += block.nbytes
        return wire.External(segment.number, block.offset, block.nbytes)

    def take_back(self, freed: Iterable[tuple[int, int]]) -> None:
        """Reuse blocks that the server has freed."""
        for block in freed:
            lease = self._lent.pop(block, None)
            if lease is not None:
                self._nbytes -= lease.nbytes

    def give_up(self, blocks: list[Any]) -> None:
        """Lend nothing any more: the server could not read these blocks."""
        self.active = False
        self.take_back([(b.segment.number, b.offset) for b in blocks if isinstance(b, Lease)])

    def retire(self) -> None:
        """Never write again into memory that a lost server may still be showing."""
        for segment in {id(lease.segment): lease.segment for lease in self._lent.values()}.values():
            self._pool.retire(segment)
        self._lent.clear()
        self._offered.clear()
        self._nbytes = 0
        self._pool.trim(_TRIM)  # release it now, not when somebody next asks for memory

    def trim(self) -> tuple[int, ...]:
        """Release unused memory; return the numbers of segments that the server can unmap."""
        self._pool.trim(_TRIM)
        closed = [number for number, segment in self._offered.items() if segment.fd < 0]
        for number in closed:
            del self._offered[number]
        return tuple(closed)

    def close(self) -> None:
        """Release the segment with the nonce."""
        if self._nonce_segment is not None:
            self._nonce_segment.close()
