"""A batch of records whose bytes are still arriving."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from tensortap.buffers import Block, Pool, size_class
from tensortap.errors import WireError
from tensortap.wire import messages as wire

_LEAST_NBYTES = 1 << 20  # small payloads of a batch may take this much, whatever the bound


class Assembly:
    """Puts a batch together; it is complete when `missing` is 0.

    `rejected` is the reason why the batch cannot be stored: its chunks are ignored then.
    """

    def __init__(self, batch: wire.Batch, body: memoryview) -> None:
        in_chunks = len(body) != batch.body_nbytes
        if in_chunks and (body or batch.body_nbytes <= wire.CHUNK_NBYTES):
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
        self, bound: int, pool: Pool, shared_block: Callable[[wire.External], Block | None]
    ) -> None:
        """Find the payloads in shared memory, and allocate memory for those that follow."""
        # even a payload of one byte takes a block
        blocks_nbytes = size_class(0) * len(self.batch.externals)
        if self.nbytes > bound or blocks_nbytes > max(bound, _LEAST_NBYTES):
            self._reject("too large")
            return
        if self.missing:
            self.body = bytearray(self.batch.body_nbytes)
        for external in self.batch.externals:
            if not external.segment:
                self.payloads.append(pool.acquire(external.nbytes))
                self.missing += external.nbytes
            elif (block := shared_block(external)) is not None:
                self.payloads.append(block)
            else:
                self._reject("unreadable segment")
                return

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
            target = self.payloads[chunk.index].writable
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
