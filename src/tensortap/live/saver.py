"""A run of everything that a server receives, for ``tensortap serve --save``."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tensortap.capture.queue import Queue, write_to
from tensortap.core.history import payload_nbytes
from tensortap.core.limits import parse_size
from tensortap.core.record import Record
from tensortap.runs.folders import end_run, make_run
from tensortap.runs.sink import StoreSink

_CLOSE_TIMEOUT = 60.0


class Saver:
    """Writes records into a run, with one queue per rank.

    Records get new sequence numbers, because several programs may send under one rank.
    """

    def __init__(self, folder: Path) -> None:
        self.path = make_run(folder, 1)
        self._queues: dict[int, Queue] = {}
        self._next_seq = 0
        self._world_size = 1

    def __call__(self, records: list[Record]) -> None:
        for record in records:
            queue = self._queues.get(record.rank)
            if queue is None:
                sink = StoreSink(self.path, record.rank)
                queue = Queue(sink, budget=parse_size("10%"), overflow="newest", name="save")
                self._queues[record.rank] = queue
            self._world_size = max(self._world_size, record.world_size)
            nbytes = payload_nbytes(record.value)
            if queue.admit(nbytes, record.name, record.kind, record.step, record.rank):
                write_to([queue], msgspec.structs.replace(record, seq=self._next_seq), nbytes)
            self._next_seq += 1

    def close(self) -> None:
        """Write what is queued, and mark the run as ended."""
        for queue in self._queues.values():
            queue.close(_CLOSE_TIMEOUT)
        end_run(self.path, self._world_size)
