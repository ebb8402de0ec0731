"""The records of one tracker: sent to a run, or kept in memory, and read back."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from tensortap.capture.pipeline import pipeline
from tensortap.core import ranks
from tensortap.core.errors import TensortapError
from tensortap.core.limits import format_size
from tensortap.core.record import Kind, Record
from tensortap.live.connections import connections
from tensortap.rooms.track.digests import PendingDigest
from tensortap.rooms.track.memory import MemorySink
from tensortap.rooms.track.observing import Explain
from tensortap.rooms.track.packed import PendingSummary
from tensortap.runs import init as run
from tensortap.stats.columns import RecordColumns

log = logging.getLogger("tensortap")


class TrackedRecords:
    """Sends records to a run or keeps them, and reads all of them back; with `to`, its own run.

    A live session gets them as well. It may belong to another job, and end before this one.
    """

    def __init__(self, to: str | Path | None = None) -> None:
        self.memory = MemorySink()
        self.run: run.OpenRun | None = None
        self._to = to
        self._names: set[tuple[Kind, str]] = set()  # a run may have records of other sources
        self._sent: dict[int, tuple[Record, ...]] = {}  # heads of columns, by identity
        self._warned = False
        self._first_seq, self._last_seq = 0, sys.maxsize

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
        self._first_seq = pipeline.next_seq()

    def end(self, next_step: int) -> None:
        """Note with which step another tracker of the run continues, and finish an own run."""
        self._last_seq = pipeline.next_seq()
        if self.run is not None:
            self.run.next_step = next_step
        if self._to is not None and run.opened() is self.run:
            run.finish()

    def send(self, record: Record, nbytes: int) -> None:
        """Send a record to a run or a live session; keep it unless there is a run."""
        if pipeline.expecting:
            connections.connect()
        if self.run is None:
            self._keep(record)
        else:
            self._names.add((record.kind, record.name))
        pipeline.put(record, nbytes)

    def offer(self, record: Record) -> None:
        """Send a record to a run or a live session; drop it if there is none."""
        try:
            if pipeline.expecting:
                connections.connect()
            if pipeline.on:
                pipeline.put(record, 0)
        except RuntimeError as error:  # no thread is left
            pipeline.fault(record.name, error)

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
        if self.run is None:
            self._keep(columns)
            for record in columns.records() if pipeline.on else ():
                pipeline.put(record)
        elif not pipeline.put_columns(columns):
            for record in columns.records():
                self.send(record, 0)
        elif id(columns.heads) not in self._sent:
            if len(self._sent) > 64:
                self._sent.clear()
            self._sent[id(columns.heads)] = columns.heads  # kept, so that no other has its id
            self._names.update((head.kind, head.name) for head in columns.heads)

    def __iter__(self) -> Iterator[Record]:
        """Yield all records so far, in order of capture; from the run if one is open."""
        if self.run is None:
            yield from self.memory.records
            return
        from tensortap.runs.run_reader import RunReader

        pipeline.flush(30)
        reader, rank = RunReader(self.run.path), ranks.rank_and_world_size()[0]
        for record in reader.new_records():
            own = self._first_seq <= record.seq < self._last_seq and record.rank == rank
            if own and (record.kind, record.name) in self._names:
                yield reader.load(record)


class PendingRecord(NamedTuple):
    """A record that waits for a device; `explain` returns tags if it is not finite."""

    record: Record
    nbytes: int
    summary: PendingSummary | None
    explain: Explain | None = None
    digest: PendingDigest | None = None

    def ready(self) -> bool:
        """Return whether the device has computed everything."""
        return all(each is None or each.ready() for each in (self.summary, self.digest))

    def resolve(self, prefix: str) -> Record | None:
        """Wait for the device and return the record; None if the program took another branch.

        `prefix` is put before the names in new tags.
        """
        record, tags, stats = self.record, self.record.tags, self.record.stats
        if self.digest is not None:
            record = msgspec.structs.replace(record, digest=self.digest.resolve())
        if self.summary is not None:
            stats = self.summary.resolve()
            if stats is None:
                return None
            if self.explain and stats.finite != stats.count:
                tags = {**tags, **prefixed_tags(self.explain(stats), prefix)}
        return msgspec.structs.replace(record, stats=stats, tags=tags)


def prefixed_tags(tags: dict[str, str], prefix: str) -> dict[str, str]:
    """Return tags with a prefix before the names in them.

    >>> prefixed_tags({"module": "fc", "call": "2"}, "model2.")
    {'module': 'model2.fc', 'call': '2'}
    """
    named = ("module", "parameter", "shared", "origin", "behind")
    return {
        key: " ".join(prefix + name for name in text.split()) if key in named else text
        for key, text in tags.items()
    }
