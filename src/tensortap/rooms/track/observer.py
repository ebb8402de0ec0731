"""Records of a tracked model, made from what hooks and intercepted functions observe."""

from __future__ import annotations

import collections
import functools
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tensortap import values as arrays
from tensortap.alerts import Alert
from tensortap.alerts.rules import Rule
from tensortap.capture.pipeline import pipeline
from tensortap.core import ranks
from tensortap.core.patterns import compile_pattern
from tensortap.core.record import Kind, Record, Summary
from tensortap.core.record import Mapping as Pairs
from tensortap.core.rooms import offer, offers
from tensortap.rooms.track.batches import (
    ColumnMaker,
    ObservedBatch,
    ObservedTensor,
    memory_of,
    summarize_together,
)
from tensortap.rooms.track.observing import (
    Explain,
    Observed,
    TrackListener,
    never_skipped,
)
from tensortap.rooms.track.options import Patterns, TrackOptions
from tensortap.rooms.track.pending_records import PendingRecord, prefixed_tags
from tensortap.rooms.track.stash import stashed
from tensortap.rooms.track.tracked_alerts import TrackedAlerts
from tensortap.rooms.track.tracked_models import register
from tensortap.rooms.track.tracked_records import TrackedRecords
from tensortap.stats import summarize
from tensortap.stats.columns import SummaryColumns
from tensortap.values.protocol import PendingDigest, PendingSummary

_OWNER = "tracker.step()"
_now = time.perf_counter_ns
_replace = msgspec.structs.replace


class Observer:
    """Turns observations into records; `advance` ends a training step."""

    def __init__(self, options: TrackOptions) -> None:
        options.check()
        self.options = options
        self.prefix = ""  # of all names; patterns do not see it
        patterns = Patterns(options.include, options.exclude, options.kinds)
        self.kinds = patterns.kinds
        self.wants = patterns.wants
        self.only_training, self.inputs = options.only_training, options.inputs
        self.fault = pipeline.fault
        self.active = False
        self.on = False  # whether `every` selects this step
        self.explains = options.has_rules
        self.skipped: Callable[[], bool] = never_skipped  # whether no optimizer made this step
        self.unseen: dict[str, str] = {}  # names that are not observed as usual, and why
        self.remarks: dict[str, str] = {}  # about names that are observed
        self._whole: re.Pattern[str] | None = None  # names of tensors to keep whole
        if options.tensors is not False and options.tensors is not None:
            pattern = "" if options.tensors is True else options.tensors
            self._whole = compile_pattern(pattern, "tensors")
        self._own_step = 0  # used unless another source owns the clock
        self._current: int | None = None  # the current step, once it is known
        self._first_step = 0
        self._pending: collections.deque[PendingRecord] = collections.deque()
        self._stash = options.stash
        values = self._whole is not None or self._stash is not None
        self._records = TrackedRecords(options.to, values)
        self._maker = ColumnMaker(self._record_of)
        self._lock = threading.RLock()  # another thread may ask for records during training
        self._alerts = TrackedAlerts(options, self._records, self._hand_over)
        self._digests = options.digests
        self._needs_values = values or self.explains or self._digests
        self.batch: ObservedBatch | None = None
        if not self._needs_values and summarize.kernel is not None:
            self.batch = ObservedBatch(self._maker, self._records.send_columns)
        self.send_columns = self._records.send_columns  # of listeners
        made = [make(self) for make in offers("track.listeners")]
        if options.analyses:
            made.insert(0, offer("track.analyses")(options.analyses, self))
        self.listeners: Sequence[TrackListener] = [each for each in made if each is not None]

    def begin(self) -> None:
        register(self, self.options.name)
        self._records.begin()
        first = self.options.init_step
        if first is None:
            # a second tracker of a run continues where the first one ended
            first = self._records.run.next_step if self._records.run is not None else 0
        self._own_step = self._first_step = first
        pipeline.clock.begin(first)
        if self.batch is not None:
            pipeline.settlers.append(self.batch.hand_over)
        self.active = self.on = True
        self._alerts.begin(first)

    def end(self) -> None:
        """Stop observing, and wait for statistics that devices are still computing."""
        self.active = self.on = False
        self.settle()
        self.report_unseen()
        if self.batch is not None and self.batch.hand_over in pipeline.settlers:
            pipeline.settlers.remove(self.batch.hand_over)
        pipeline.clock.release(_OWNER)
        self._records.end(self._own_step)

    # -- observing -----------------------------------------------------------------------

    @property
    def step_number(self) -> int:
        if self._current is None:
            step = pipeline.clock.step
            self._current = self._own_step if step is None else step
        return self._current

    @property
    def capturing(self) -> bool:
        return self.on and pipeline.enabled

    def observe(
        self,
        observed: Observed,
        value: Any,
        step: int | None = None,
        stats: Summary | None = None,
        explain: Explain | None = None,
    ) -> Summary | None:
        """Make a record of a tensor: of its statistics and, if selected, of its values.

        `stats` are its statistics if they are known. Returns them, unless they are pending.
        `explain` is called if it is not finite.
        """
        start = _now()
        pending = None
        if self.batch is not None and stats is None:
            memory = memory_of(value)
            if memory is not None:
                step = self.step_number if step is None else step
                self.batch.add(observed, memory, step, start)
                return None
        if stats is None:
            stats, pending = arrays.summary_of(value)
        if explain is not None and stats is not None and stats.finite != stats.count:
            observed = observed._replace(tags={**observed.tags, **explain(stats)})
        self.add(observed, stats, pending, value, step, explain)
        pipeline.ledger.track(_now() - start)
        return stats

    def observe_all(self, found: Sequence[tuple[Observed, Any]], step: int | None = None) -> None:
        """Make records of tensors in their order; those in memory are summarized together."""
        step = self.step_number if step is None else step
        add_all = functools.partial(self._add_all, step)
        summarize_together(found, add_all, functools.partial(self.observe, step=step))

    def _add_all(self, step: int, found: Sequence[ObservedTensor], stats: SummaryColumns) -> None:
        if not self._needs_values:
            described = [observed for observed, _ in found]
            self._hand_over()
            self._records.send_columns(self._maker.columns(described, stats, step))
            return
        for (observed, value), summary in zip(found, stats.summaries(), strict=True):
            self.add(observed, summary, None, value, step)

    def _hand_over(self) -> None:
        """Send what was observed so far, before anything that comes later gets its `seq`."""
        if self.batch is not None:
            self.batch.hand_over()

    def add(
        self,
        observed: Observed,
        stats: Summary | None,
        pending: PendingSummary | None = None,
        value: Any = None,
        step: int | None = None,
        explain: Explain | None = None,
    ) -> None:
        """Make a record of statistics; if they are pending, once a device has computed them.

        Of pending ones that turn out not to be finite, `explain` gets the tags.
        """
        if step is None:
            step = self.step_number
        self._hand_over()
        rank, world_size = ranks.rank_and_world_size()
        seq, now = pipeline.next_seq(), time.time_ns()
        record = self._record_of(observed, step, seq, rank, world_size, now, stats)
        nbytes, later = 0, None
        if value is not None and self._needs_values:
            if self._digests:
                digest = arrays.shard_digest_of(value, observed.shard)
                if isinstance(digest, PendingDigest):
                    later = digest
                else:
                    record = _replace(record, digest=digest)
            record, nbytes = self._with_value(record, value)
        if pending is None and later is None:
            self._put(record, nbytes)
        else:
            self._pending.append(PendingRecord(record, nbytes, pending, explain, later))

    def _record_of(
        self,
        observed: Observed,
        step: int = 0,
        seq: int = 0,
        rank: int = 0,
        world_size: int = 1,
        time_ns: int = 0,
        stats: Summary | None = None,
    ) -> Record:
        tags = prefixed_tags(observed.tags, self.prefix) if self.prefix else observed.tags
        return Record(
            self.prefix + observed.name, observed.kind, step, observed.call, seq, rank, world_size,
            time_ns, observed.type, observed.dtype, observed.shape, observed.shard, None, None,
            stats, tags,
        )  # fmt: skip

    def prefixed(self, reasons: dict[str, str]) -> dict[str, str]:
        """Return reasons by the names that records have."""
        return {self.prefix + name: reason for name, reason in reasons.items()}

    def _with_value(self, record: Record, value: Any) -> tuple[Record, int]:
        """Return the record with what the user's stash gave and, if selected, the tensor."""
        extra: list[tuple[Any, Any]] = []
        nbytes = 0
        if self._stash is not None:
            try:
                extra, nbytes = stashed(self._stash(value))
            except Exception as error:
                kept = f"raised for {record.name!r}, whose record has no extra statistics"
                pipeline.fault("stash", error, kept)
        if not self._keeps_whole(record):
            return _replace(record, value=Pairs(tuple(extra))) if extra else record, nbytes
        snapshot, more = arrays.snapshot(value, pipeline.pool)
        if extra:
            snapshot = Pairs((("tensor", snapshot), *extra))
            record = _replace(record, tags={**record.tags, "stash": "1"})
        return _replace(record, value=snapshot), nbytes + more

    def _keeps_whole(self, record: Record) -> bool:
        if self._whole is not None and self._whole.search(record.name.removeprefix(self.prefix)):
            return True
        return self._alerts.keeps_whole(record)

    def poll(self) -> None:
        """Put the records whose statistics are computed, in order and without waiting."""
        with self._lock:
            while self._pending and self._pending[0].ready():
                self._resolve(self._pending.popleft())

    def settle(self) -> None:
        """Wait for the devices and put all pending records."""
        self._hand_over()
        with self._lock:
            while self._pending:
                self._resolve(self._pending.popleft())

    def _resolve(self, pending: PendingRecord) -> None:
        try:
            record = pending.resolve(self.prefix)
        except Exception as error:
            pipeline.fault(pending.record.name, error)
            return
        if record is not None:
            self._put(record, pending.nbytes)

    def metric(self, name: str, value: float, step: int | None = None) -> None:
        """Record a number about the current step, or about another one."""
        self._hand_over()
        rank, world_size = ranks.rank_and_world_size()
        step = self.step_number if step is None else step
        self._put(
            Record(
                self.prefix + name, Kind.METRIC, step, 0, pipeline.next_seq(), rank, world_size,
                time.time_ns(), "builtins.float", value=value,
            ), 0,
        )  # fmt: skip

    def _put(self, record: Record, nbytes: int) -> None:
        self._records.send(record, nbytes)
        self._alerts.see(record)

    @property
    def rules(self) -> Sequence[Rule]:
        """The rules of the option `alerts`."""
        return self._alerts.rules

    def raise_alert(self, alert: Alert) -> None:
        """Take an alert that a listener has raised."""
        self._alerts.raise_alert(alert, self.prefix)

    def report_unseen(self) -> None:
        """Log what is not observed as usual, and record an alert for each name."""
        step, prefix = self.step_number, self.prefix
        self._alerts.report("unseen", self.unseen, step, prefix, limited=True)
        self._alerts.report("remark", self.remarks, step, prefix, limited=False)

    def advance(self) -> None:
        """End the step; what is observed from now on belongs to the next one."""
        self.poll()
        self.report_unseen()
        step = self.step_number
        # of two trackers that advance in turn, neither sets the clock back
        pipeline.advance(_OWNER, max(step + 1, pipeline.clock.step or 0))
        self._own_step = step + 1
        # fixed now: when it is first needed, another tracker may have advanced the clock
        self._current = self._own_step if pipeline.clock.owner == _OWNER else None
        selected = (self._own_step - self._first_step) % self.options.every == 0
        self.on = self.active and selected
        self._alerts.end_step(self.skipped)

    # -- results -------------------------------------------------------------------------

    @property
    def records(self) -> Iterator[Record]:
        """All records so far, in order of capture; from the run if one is open."""
        self.settle()
        yield from self._records

    @property
    def evicted(self) -> int:
        """Number of records evicted from the memory of the tracker."""
        return self._records.memory.evicted

    @property
    def alerts(self) -> list[Alert]:
        return list(self._alerts.alerts)

    @property
    def hints(self) -> list[Alert]:
        return list(self._alerts.hints)

    @property
    def run_path(self) -> Path | None:
        """The folder of the run that takes the records, or None."""
        return None if self._records.run is None else self._records.run.path
