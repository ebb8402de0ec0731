"""Compare what is tracked with an earlier run while training runs, step by step.

A thread of its own reads the reference and compares. Ranks that are laid out as in the reference
compare their own records; otherwise the first rank gets those of all others, without their values.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tensortap import ranks
from tensortap.alerts import Alert
from tensortap.alerts.alert import module_of
from tensortap.compare.compared_run import ComparedRun
from tensortap.compare.report import CompareReport
from tensortap.compare.runs import compare_runs
from tensortap.compare.tensors import check_tolerance
from tensortap.errors import TensortapError
from tensortap.frameworks.observing import RankStore
from tensortap.frameworks.registry import loaded_frameworks
from tensortap.pipeline.pipeline import pipeline
from tensortap.record import Kind, Record
from tensortap.runs.tables import Unit
from tensortap.stats.columns import RecordColumns
from tensortap.stats.shard_digest import is_shard_digest
from tensortap.table.run_window import RunWindow
from tensortap.table.table import Table

log = logging.getLogger("tensortap")

_QUEUED = 16  # steps that wait to be compared
_MOST_BYTES = 256 << 20  # of values that wait
_PATIENCE = 60.0  # seconds to wait for other ranks, and for a comparison
_STORED = 8  # steps of a rank that stay in the store
_numbers = itertools.count()  # all ranks count alike
_Step = list[Record | RecordColumns]
_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(list[Record]).decode


class ReferenceCheck:
    """Compares the records of each step with a run, until the first difference."""

    def __init__(self, path: str | Path, atol: float | None, rtol: float | None) -> None:
        check_tolerance(atol, rtol)
        self._run = ReferenceRun(path)
        self._atol, self._rtol = atol, rtol
        self._step: _Step = []
        self._bytes = 0
        self._queue: queue.Queue[_Step | None] = queue.Queue(_QUEUED)
        self._thread: threading.Thread | None = None
        self._open: Callable[[str], RankStore] | None = None
        self._found: Alert | None = None
        self._done = False  # after the first difference, or an error
        self._steps_seen = self._compared = 0

    @property
    def has_digests(self) -> bool:
        """Whether the reference has digests, so that they are worth computing."""
        table = self._run.table()  # of the first records
        first = np.arange(min(len(table), 256))
        return any(map(is_shard_digest, table.take(first, ["digest"]).column(0).to_pylist()))

    def begin(self) -> None:
        """Start comparing."""
        _, world_size = ranks.rank_and_world_size()
        if world_size > 1 and len(self._run.reader.ranks) != world_size:
            found = (each.open_store() for each in loaded_frameworks())
            self._open = next((each for each in found if each is not None), None)
        name = f"reference/{next(_numbers)}"
        self._thread = threading.Thread(
            target=self._compare_all, args=(name,), name="tensortap-reference", daemon=True
        )
        self._thread.start()

    def take(self, record: Record | RecordColumns, nbytes: int = 0) -> None:
        """Take a record of the current step."""
        if self._done:
            return
        if nbytes and self._bytes + nbytes > _MOST_BYTES and isinstance(record, Record):
            record = msgspec.structs.replace(record, value=None)  # statistics are left
        else:
            self._bytes += nbytes
        self._step.append(record)

    def end_step(self) -> None:
        """Hand the records of the step over to the thread."""
        step, self._step, self._bytes = self._step, [], 0
        if step and not self._done:
            try:
                self._queue.put_nowait(step)
            except queue.Full:
                error = TensortapError("earlier steps are still being compared")
                pipeline.fault("reference", error, "was not compared in this step")

    def wait(self) -> None:
        """Wait until everything that was handed over is compared, but not for ever."""
        deadline = time.monotonic() + _PATIENCE
        while self._queue.unfinished_tasks and not self._done and time.monotonic() < deadline:
            time.sleep(0.001)

    def poll(self) -> Alert | None:
        """Return the first difference, once."""
        found, self._found = self._found, None
        return found

    def close(self) -> None:
        """Compare what is left and stop."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self.end_step()
            self.wait()
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
            thread.join(1.0)
            if self._steps_seen and not self._compared:
                log.warning("tensortap: %s has none of these records", self._run.title)

    def _compare_all(self, name: str) -> None:
        try:
            gather = None if self._open is None else RecordGather(self._open(name))
            for step in self._steps():
                records = [
                    record
                    for each in step
                    for record in (each.records() if isinstance(each, RecordColumns) else [each])
                ]
                gathered = records if gather is None else gather.gather(records)
                if gathered:
                    self._compare(gathered, own=gather is None)
        except Exception as error:
            with contextlib.suppress(Exception):  # in strict mode; nobody could catch it here
                pipeline.fault("reference", error, "is no longer compared")
        self._done = True

    def _steps(self) -> Iterator[_Step]:
        while (step := self._queue.get()) is not None and not self._done:
            yield step
            self._queue.task_done()

    def _compare(self, records: list[Record], own: bool) -> None:
        steps = [record.step for record in records]
        self._run.look_at(min(steps), max(steps))
        several = own and len(self._run.reader.ranks) > 1
        report = compare_runs(
            self._run, ComparedRun(StepReader(records)), steps=(min(steps), max(steps)),
            ranks=(records[0].rank,) if several else (), allow_missing=True,
            atol=self._atol, rtol=self._rtol,
        )  # fmt: skip
        self._steps_seen += 1
        self._compared += report.compared
        if report.first is not None:
            self._found = _alert(report, self._run.title, records)
            self._done = True


class ReferenceRun(ComparedRun):
    """The reference, of which only the steps that are compared are in memory."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        first = [(rank, unit) for rank, t in self.reader.by_rank.items() for unit in t.units()[:1]]
        self._units: list[tuple[int, Unit]] = []
        self._open(first[:1])

    def look_at(self, low: int, high: int) -> None:
        """Read what may hold the records from one step to another."""
        by_rank = self.reader.by_rank.items()
        units = [(rank, unit) for rank, t in by_rank for unit in t.units(step=low, until=high)]
        if units != self._units:
            self._open(units)

    def _open(self, units: list[tuple[int, Unit]]) -> None:
        self._units = units
        self._table = Table(lambda: RunWindow(self.reader, units))


class StepReader:
    """The records of one step, in memory, as compare reads them."""

    def __init__(self, records: list[Record]) -> None:
        self._records: dict[str, list[Record]] = {}
        for record in records:
            self._records.setdefault(record.name, []).append(record)

    def names(self) -> list[str]:
        return list(self._records)

    def records(self, name: str) -> list[Record]:
        return self._records[name]

    def load(self, record: Record) -> Record:
        place = record.rank, record.seq
        found = (each for each in self._records[record.name] if (each.rank, each.seq) == place)
        return next(found, record)


class RecordGather:
    """Brings the records of all ranks to the first one, through a store that they share."""

    def __init__(self, store: RankStore) -> None:
        self._store = store
        self._number = itertools.count()

    def gather(self, records: list[Record]) -> list[Record]:
        """Return the records of all ranks on the first one, nothing on the others."""
        store, number = self._store, next(self._number)
        heads = [msgspec.structs.replace(record, value=None) if record.stats else record
                 for record in records]  # fmt: skip
        if store.rank != store.ranks[0]:
            store.put(f"{number}/{store.rank}", _encode(heads))
            store.delete(f"{number - _STORED}/{store.rank}")
            return []
        keys = [f"{number}/{rank}" for rank in store.ranks[1:]]
        deadline, pause = time.monotonic() + _PATIENCE, 0.002
        while (found := store.get(keys)) is None:
            if time.monotonic() > deadline:
                raise TensortapError(f"the records of other ranks are missing after {_PATIENCE} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return [*heads, *(record for each in found for record in _decode(each))]


def _alert(report: CompareReport, title: str, records: list[Record]) -> Alert:
    first = report.first
    assert first is not None
    key = first.key
    same: Any = next((r for r in records if r.name == key.name and r.kind.value == key.kind), None)
    module = "" if same is None else module_of(same)
    how = f" (by {first.by})" if first.by != "value" else ""
    message = f"differs from {title}: {first.comparison.line}{how}"
    if report.culprit:
        message += f"; {report.culprit}"
    return Alert(
        "reference", key.name, Kind(key.kind), key.step, max(key.rank, 0), module, message, module,
        key.call, facts={"max_abs": first.comparison.max_abs},
    )  # fmt: skip
