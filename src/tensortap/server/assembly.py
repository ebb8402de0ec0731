"""A batch of records on its way in: checked before anything is allocated, then put together."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from tensortap.buffers import Pool, size_class
from tensortap.errors import WireError
from tensortap.wire import messages as wire

_LEAST = 1 << 20  # of blocks for small payloads, whatever the bound


class Unreachable(Exception):
    """A payload lies in a segment that this process cannot read."""


class Assembly:
    """A batch whose bytes are still arriving; `missing` tells how many."""

    def __init__(self, batch: wire.Batch, body: memoryview) -> None:
        later = len(body) != batch.body_nbytes
        if later and (body or batch.body_nbytes <= wire.CHUNK_NBYTES):
            raise WireError(f"{batch.body_nbytes} bytes of records announced, {len(body)} came")
        self.batch = batch
        self.nbytes = batch.body_nbytes + sum([e.nbytes for e in batch.externals])
        self.missing = batch.body_nbytes if later else 0
        self._expects_body = later
        self._filled: collections.Counter[int] = collections.Counter()
        self.refused = ""
        self.body: Any = b"" if later else bytes(body)
        self.blocks: list[Any] = []

    def allocate(self, bound: int, pool: Pool, slot: Callable[[wire.External], Any]) -> None:
        """Make room for what is to come; a batch that cannot be taken is `refused`."""
        # a payload of one byte takes a block as well
        blocks = size_class(0) * len(self.batch.externals)
        if self.nbytes > bound or blocks > max(bound, _LEAST):
            self._refuse("larger than the memory")
            return
        if self.missing:
            self.body = bytearray(self.batch.body_nbytes)
        for external in self.batch.externals:
            if external.segment:
                try:
                    self.blocks.append(slot(external))
                except Unreachable:
                    self._refuse("out of reach")
                    return
            else:
                self.blocks.append(pool.acquire(external.nbytes))
                self.missing += external.nbytes

    def _refuse(self, why: str) -> None:
        self.refused = why
        self.missing = 0
        self.blocks = []

    def fill(self, part: wire.Chunk, data: memoryview) -> None:
        """Put a part where it belongs."""
        if self.refused:
            return
        if part.index == wire.BODY and self._expects_body:
            target = memoryview(self.body)
        elif 0 <= part.index < len(self.blocks):
            if self.batch.externals[part.index].segment:
                raise WireError("a part of a payload that lies in a segment")
            target = self.blocks[part.index].writable
        else:
            raise WireError(f"a part of payload {part.index}, of which there is none")
        # in their order: two parts in one place would leave another place with old bytes
        if part.offset != self._filled[part.index]:
            raise WireError("a part out of order")
        end = part.offset + data.nbytes
        if end > target.nbytes:
            raise WireError("a part that goes beyond its payload")
        target[part.offset : end] = data
        self._filled[part.index] = end
        self.missing -= data.nbytes
