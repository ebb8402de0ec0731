"""What a live session receives, kept as a run as well."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tensortap.history import payload_nbytes
from tensortap.limits import parse_size
from tensortap.pipeline.queue import Background
from tensortap.pipeline.ticket import Ticket
from tensortap.record import Record
from tensortap.runs.folders import end_run, make_run
from tensortap.sinks.store import Store

_END = 60.0


class Saver:
    """Writes records into a run, each into the part of its rank.

    The numbers that order them are given anew: several programs may send under one rank.
    """

    def __init__(self, folder: Path) -> None:
        self.path = make_run(folder, 1)
        self._sinks: dict[int, Background] = {}
        self._number = 0
        self._world_size = 1

    def __call__(self, records: list[Record]) -> None:
        for record in records:
            sink = self._sinks.get(record.rank)
            if sink is None:
                store = Store(self.path, record.rank)
                sink = Background(store, budget=parse_size("10%"), overflow="newest", name="save")
                self._sinks[record.rank] = sink
            self._world_size = max(self._world_size, record.world_size)
            nbytes = payload_nbytes(record.value)
            if sink.admit(nbytes):
                numbered = msgspec.structs.replace(record, seq=self._number)
                sink.write(numbered, Ticket(1), nbytes)
            else:
                sink.missed(record.name, record.kind, record.step, record.rank)
            self._number += 1

    def close(self) -> None:
        """Write what is under way, and say in the run that it has ended."""
        for sink in self._sinks.values():
            sink.close(_END)
        end_run(self.path, self._world_size)
