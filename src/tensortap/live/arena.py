"""Memory that the server on the same host reads, instead of receiving its bytes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
from collections.abc import Callable
from typing import Any

from tensortap.capture.fast import RecordBlock
from tensortap.core.buffers import Lease, Pool, Segment
from tensortap.live import messages as wire

_LEAST_BODY = 4096  # bytes; blocks have whole pages


class Lender:
    """Lends blocks of the arena to one server, until it has acknowledged their batch."""

    def __init__(self, pool: Pool, *, wanted: bool) -> None:
        self.active = False  # whether the server can read our memory
        self._pool = pool
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
            self._pool.prepare()

    def in_place(self, block: Any, wait: Callable[[], bool]) -> Any:
        """Return the block with its bytes complete, in the arena if it gets room.

        `wait` waits until the server has returned blocks; it returns False if there is no hope.
        """
        view: memoryview = block.view
        if not self.active or (isinstance(block, Lease) and block.segment.number):
            return block
        copy = self._copy(view)
        if copy is None and view.nbytes <= self._pool.nbytes:
            # encryption would take far longer, and new snapshots must not take all that returns
            self._pool.arena_is_wanted = True
            try:
                while copy is None and wait():
                    copy = self._copy(view)
            finally:
                self._pool.arena_is_wanted = False
        return block if copy is None else copy

    def place_body(self, body: bytes) -> bytes | Lease:
        """Return the body of a batch in the arena, unless it is small: sockets encrypt it."""
        return (len(body) >= _LEAST_BODY and self._copy(memoryview(body))) or body

    def place_block(self, block: RecordBlock) -> memoryview | Lease:
        """Return rows and payloads of a block, in the arena unless they are few."""
        nbytes = block.nbytes
        shared = self.active and nbytes >= _LEAST_BODY
        lease = self._pool.acquire_shared(nbytes) if shared else None
        body = memoryview(bytearray(nbytes)) if lease is None else lease.writable
        block.move(body)
        return body if lease is None else lease

    def _copy(self, view: memoryview) -> Lease | None:
        lease = self._pool.acquire_shared(view.nbytes) if self.active else None
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

    def tidy(self) -> None:
        """Release memory that is not needed any more."""
        self._pool.tidy()

    def abandon(self) -> None:
        """Never write again into memory that a server which was given up may still read."""
        if self.active:
            self._pool.renew()
