"""The records of one tracker: sent to a run or a live session, else kept, and read back."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tensortap.capture.memory import MemorySink
from tensortap.capture.pipeline import pipeline
from tensortap.capture.ticket import SKIPPED
from tensortap.core import ranks
from tensortap.core.errors import TensortapError
from tensortap.core.limits import format_size
from tensortap.core.record import Kind, Record
from tensortap.live.address import Address
from tensortap.live.connections import connections
from tensortap.runs import init as run
from tensortap.stats.columns import RecordColumns

log = logging.getLogger("tensortap")

_HEADS = 64  # sets of names that were sent as columns


class TrackedRecords:
    """Sends records, keeps those that nobody takes, and reads all of them back.

    With `to` they get a run of their own. `values` is whether records may have values,
    which a live session gives only one by one.
    """

    def __init__(self, to: str | Path | None, values: bool) -> None:
        self.memory = MemorySink()
        self.run: run.OpenRun | None = None
        self._to = to
        self._values = values
        self._session: Address | None = None  # the live session that has taken records
        self._names: set[tuple[Kind, str]] = set()  # a run may have records of other sources
        self._ranks: set[int] = set()  # more than one if this process simulates them
        self._sent: dict[int, tuple[Record, ...]] = {}  # heads of columns, by identity
        self._warned = False
        self._first_seq = self._began = 0
        self._last_seq = sys.maxsize

    def begin(self) -> None:
        """Use the run that is open, or open one."""
        if self._to is not None:
            if (opened := run.opened()) is not None:
                raise TensortapError(
                    f"to={str(self._to)!r}: the run {opened.path} is open and "
                    "gets all records; leave `to` out, or call tap.finish() first"
                )
            run.init(self._to)
        self.run = run.opened()
        self._first_seq, self._began = pipeline.next_seq(), time.time_ns()

    def end(self, next_step: int) -> None:
        """Note with which step another tracker of the run continues, and finish an own run."""
        self._last_seq = pipeline.next_seq()
        if self.run is not None:
            self.run.next_step = next_step
        if self._to is not None and run.opened() is self.run:
            run.finish()

    def send(self, record: Record, nbytes: int) -> None:
        """Send a record, or keep it if nobody takes it."""
        if pipeline.expecting:
            connections.connect()
        session = connections.session if self.run is None else None
        sent = pipeline.put(record, nbytes) is not SKIPPED
        if self.run is not None or (sent and session is not None):
            self._names.add((record.kind, record.name))
            self._ranks.add(record.rank)
            self._session = session or self._session
            return
        self._keep(record)

    def offer(self, record: Record) -> None:
        """Send a record to a run or a live session; drop it if there is none."""
        if pipeline.expecting:
            connections.connect()
        if pipeline.on:
            pipeline.put(record, 0)

    def _keep(self, record: Record | RecordColumns) -> None:
        self.memory.keep(record)
        if self.memory.evicted and not self._warned:
            self._warned = True
            log.warning(
                "tensortap: the tracker keeps the latest %s of records; it evicts older ones. "
                "tap.init('runs') keeps all on disk", format_size(self.memory.bound),
            )  # fmt: skip

    def send_columns(self, columns: RecordColumns) -> None:
        """Send records as columns if the run takes them, else one by one; or keep them."""
        if pipeline.expecting:
            connections.connect()
        if self.run is None and not pipeline.on:
            self._keep(columns)
        elif self.run is None or not pipeline.put_columns(columns):
            for record in columns.records():
                self.send(record, 0)
        elif id(columns.heads) not in self._sent:
            if len(self._sent) > _HEADS:
                self._sent.clear()
            self._sent[id(columns.heads)] = columns.heads  # kept, so that no other has its id
            self._names.update((head.kind, head.name) for head in columns.heads)

    def __iter__(self) -> Iterator[Record]:
        """Yield all records so far, in order of capture; from the run if one is open."""
        if self.run is None:
            yield from self.memory.records
        if self.run is not None or self._session is not None:
            pipeline.flush(30)
            yield from self._from_run() if self.run is not None else self._from_session()

    def _is_own(self, record: Record) -> bool:
        own = self._first_seq <= record.seq < self._last_seq
        is_here = record.rank == _rank() or record.rank in self._ranks
        return own and (record.kind, record.name) in self._names and is_here

    def _from_run(self) -> Iterator[Record]:
        from tensortap.runs.run_reader import RunReader

        assert self.run is not None
        reader = RunReader(self.run.path)
        yield from (reader.load(r) for r in reader.new_records() if self._is_own(r))

    def _from_session(self) -> Iterator[Record]:
        from tensortap.live.reader import LiveReader

        assert self._session is not None
        try:
            with LiveReader(self._session) as session:
                cursor, records = session.since(0)
                while records:
                    for record in records:
                        if self._is_own(record) and record.time_ns >= self._began:
                            complete = not self._values or record.value is not None
                            yield record if complete else session.load(record)
                    cursor, records = session.since(cursor)
        except TensortapError as error:
            log.warning("tensortap: the session has the records of this tracker: %s", error)


def _rank() -> int:
    return ranks.rank_and_world_size()[0]
