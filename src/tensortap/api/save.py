"""What a live session receives, kept as a run as well."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tensortap.history import payload_nbytes
from tensortap.limits import parse_size
from tensortap.pipeline.queue import Queue, write_to
from tensortap.record import Record
from tensortap.runs.folders import end_run, make_run
from tensortap.sinks.store import StoreSink

_END = 60.0


class Saver:
    """Writes records into a run, each into the part of its rank.

    The numbers that order them are given anew: several programs may send under one rank.
    """

    def __init__(self, folder: Path) -> None:
        self.path = make_run(folder, 1)
        self._queues: dict[int, Queue] = {}
        self._number = 0
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
                numbered = msgspec.structs.replace(record, seq=self._number)
                write_to([queue], numbered, nbytes)
            self._number += 1

    def close(self) -> None:
        """Write what is under way, and say in the run that it has ended."""
        for queue in self._queues.values():
            queue.close(_END)
        end_run(self.path, self._world_size)
