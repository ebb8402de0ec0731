"""Records of a tracked model, made from what hooks and intercepted functions observe."""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import math
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from tensortap.core.rooms import offers
from tensortap.live.connections import connections
from tensortap.rooms.track import packed
from tensortap.rooms.track.batches import (
    ColumnMaker,
    Costs,
    ObservedBatch,
    ObservedTensor,
    memory_of,
    summarize_together,
)
from tensortap.rooms.track.budget import Budget, parse_budget
from tensortap.rooms.track.digests import PendingDigest, shard_digest_of
from tensortap.rooms.track.observing import Explain, Observed, TrackListener
from tensortap.rooms.track.options import Patterns, TrackOptions
from tensortap.rooms.track.plan import LookPlan
from tensortap.rooms.track.tracked_alerts import TrackedAlerts
from tensortap.rooms.track.tracked_records import PendingRecord, TrackedRecords, prefixed_tags
from tensortap.stats import summarize
from tensortap.stats.columns import SummaryColumns

log = logging.getLogger("tensortap")

_OWNER = "tracker.step()"
_now = time.perf_counter_ns
_replace = msgspec.structs.replace
_observers: weakref.WeakSet[Observer] = weakref.WeakSet()


def is_tracking() -> bool:
    """Return whether any model is tracked now."""
    return any(observer.active for observer in _observers)


class Observer:
    """Turns observations into records; `advance` ends a training step."""

    def __init__(self, options: TrackOptions) -> None:
        options.check()
        self.options = options
        self.prefix = ""  # of all names; patterns do not see it
        patterns = Patterns(options.include, options.exclude, options.kinds)
        self.kinds = patterns.kinds
        share = parse_budget(options.budget)
        self.costs = Costs()
        budget = None if share is None else Budget(share, self.costs)
        self.plan = LookPlan(patterns, options.every, budget)
        self.could_want = patterns.wants
        self.wants = patterns.wants  # without changes of a session, all steps want the same
        self.only_training, self.inputs = options.only_training, options.inputs
        self.active = False
        self.on = False  # whether `every` selects this step
        self._switched: int | None = None  # what `every` will be in the next step
        self.explains = options.has_rules
        # whether no optimizer made the last step; hooks on an optimizer set it
        self.skipped: Callable[[], bool] | None = None
        self.unseen: dict[str, str] = {}  # names that are not observed as usual, and why
        self.remarks: dict[str, str] = {}  # about names that are observed
        self._whole: re.Pattern[str] | None = None  # names of tensors to keep whole
        if options.tensors is not False and options.tensors is not None:
            pattern = "" if options.tensors is True else options.tensors
            self._whole = compile_pattern(pattern, "tensors")
        self._own_step = 0  # used unless another source owns the clock
        self._current: int | None = None  # the current step, once it is known
        self._infinite: set[str] = set()  # numbers that were not finite once
        self._pending: collections.deque[PendingRecord] = collections.deque()
        self._reported = 0  # how many names of `unseen` and `remarks` were looked at
        values = self._whole is not None or options.stash is not None
        self.sent = TrackedRecords(options.to)
        self._maker = ColumnMaker(self._record_of)
        self._lock = threading.RLock()  # another thread may ask for records during training
        self.alerting = TrackedAlerts(options, self.sent, self._hand_over, self.plan.budget)
        self._always_values = values or self.explains or options.digests
        self._needs_values = self._needed_values = self._always_values
        self.batch: ObservedBatch | None = None
        if not self._needs_values and summarize.kernel is not None:
            self.batch = ObservedBatch(self._maker, self.sent.send_columns, self.costs)
        self.send_columns = self.sent.send_columns  # of listeners
        made = [make(value, self) for make, value in options.made_by_rooms()]
        made += [make(self) for make in offers("track.listeners")]
        self.listeners: Sequence[TrackListener] = [each for each in made if each is not None]

    @property
    def rules(self) -> Sequence[Rule]:
        """The rules of the option `alerts`."""
        return self.alerting.rules

    def begin(self) -> None:
        self._choose_prefix()
        self.sent.begin()
        first = self.options.init_step
        if first is None:
            # a second tracker of a run continues where the first one ended
            first = self.sent.run.next_step if self.sent.run is not None else 0
        self._own_step = first
        pipeline.clock.begin(first)
        if self.batch is not None:
            pipeline.settlers.append(self.batch.hand_over)
        self.plan.restart(self.options.every, first)
        self.active = True
        self._begin_step()
        if self.plan.idle and pipeline.expecting:
            connections.connect()  # a session may switch it on
        self.alerting.begin(first)

    def _choose_prefix(self) -> None:
        """Keep names apart from those of other models: by the user's prefix, or by a free one."""
        taken = {other.prefix for other in _observers if other.active}
        name = self.options.name
        if name is not None:
            self.prefix = f"{name}."
            if self.prefix in taken:
                raise ValueError(f"name {name!r} is already used by another tracker")
        elif "" in taken:
            self.prefix = next(p for n in itertools.count(2) if (p := f"model{n}.") not in taken)
            log.warning(
                "tensortap: another model is tracked already, so the names of this one begin with "
                "%r; tap.track(model, name=...) chooses a name", self.prefix,
            )  # fmt: skip
        self.plan.prefix = self.alerting.prefix = self.prefix
        _observers.add(self)

    def end(self) -> None:
        """Stop observing, and wait for statistics that devices are still computing."""
        self.active = self.on = False
        self.settle()
        clock = pipeline.clock
        if clock.owner not in (None, _OWNER) and (clock.step or 0) > self.step_number + 1:
            self.unseen[_OWNER] = f"call it at the end of each step, also beside {clock.owner}"
        self.report_unseen()
        if self.batch is not None and self.batch.hand_over in pipeline.settlers:
            pipeline.settlers.remove(self.batch.hand_over)
        clock.release(_OWNER)
        self.sent.end(self._own_step)

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
        if self.batch is not None and stats is None and not self._needs_values:
            memory = memory_of(value)
            if memory is not None:
                step = self.step_number if step is None else step
                self.batch.add(observed, memory, step, start)
                return None
        if stats is None:
            stats, pending = packed.summary_of(value)
        if explain is not None and stats is not None and stats.finite != stats.count:
            observed = observed._replace(tags={**observed.tags, **explain(stats)})
        self.add(observed, stats, pending, value, step, explain)
        self.costs.add([observed], [_now() - start])
        return stats

    def fault(self, name: str, error: Exception) -> None:
        """Take an error of a hook: what it has not seen is listed, counted and logged."""
        self.unseen.setdefault(str(name), f"{type(error).__name__}: {error}")
        pipeline.fault(name, error)

    def observe_all(self, found: Sequence[tuple[Observed, Any]], step: int | None = None) -> None:
        """Make records of tensors in their order; those in memory are summarized together."""
        step = self.step_number if step is None else step
        add_all = functools.partial(self._add_all, step)
        add_one = functools.partial(self.observe, step=step)
        summarize_together(found, add_all, add_one, self.fault, self.costs.share)

    def _add_all(self, step: int, found: Sequence[ObservedTensor], stats: SummaryColumns) -> None:
        if not self._needs_values:
            described = [observed for observed, _ in found]
            self._hand_over()
            self.sent.send_columns(self._maker.columns(described, stats, step))
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
        pending: packed.PendingSummary | None = None,
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
            if self.options.digests:
                digest = shard_digest_of(value, observed.shard)
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

    def _with_value(self, record: Record, value: Any) -> tuple[Record, int]:
        """Return the record with what the user's stash gave and, if selected, the tensor."""
        extra: list[tuple[Any, Any]] = []
        nbytes = 0
        if self.options.stash is not None:
            try:
                extra, nbytes = stashed(self.options.stash(value))
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
        if self.plan.keeps(record.kind, record.name.removeprefix(self.prefix)):
            return True
        return self.alerting.keeps_whole(record)

    def settle(self, wait: bool = True) -> None:
        """Put all pending records, in order; without `wait`, those that devices have computed."""
        if wait:
            self._hand_over()
        with self._lock:
            while self._pending and (wait or self._pending[0].ready()):
                pending = self._pending.popleft()
                try:
                    record = pending.resolve(self.prefix)
                except Exception as error:
                    self.fault(pending.record.name.removeprefix(self.prefix), error)
                    continue
                if record is not None:
                    self._put(record, pending.nbytes)

    def takes_values(self, kind: Kind, name: str) -> bool:
        """Return whether a name needs more than statistics: its values, or a look by rules."""
        return self._always_values or self.plan.keeps(kind, name)

    def change_rules(self, names: Sequence[str]) -> None:
        """Have these rules look at all records from the next step on."""
        self.alerting.change_rules(names)
        self._always_values = bool(names) or self._needed_values
        self.plan.changed = True

    def metric(self, name: str, value: float, step: int | None = None) -> None:
        """Record a number about the current step, or about another one."""
        self._hand_over()
        rank, world_size = ranks.rank_and_world_size()
        step = self.step_number if step is None else step
        if self.plan.budget is not None and not math.isfinite(value) and name not in self._infinite:
            self._infinite.add(name)
            self.plan.budget.lift("", step)
        self._put(
            Record(
                self.prefix + name, Kind.METRIC, step, 0, pipeline.next_seq(), rank, world_size,
                time.time_ns(), "builtins.float", value=value,
            ), 0,
        )  # fmt: skip

    def _put(self, record: Record, nbytes: int) -> None:
        self.sent.send(record, nbytes)
        self.alerting.see(record)

    def raise_alert(self, alert: Alert) -> None:
        """Take an alert that a listener has raised."""
        self.alerting.raise_alert(alert, self.prefix)

    def report_unseen(self) -> None:
        """Log what is not observed as usual, and record an alert for each name."""
        step, prefix = self.step_number, self.prefix
        self.alerting.report("unseen", self.unseen, step, prefix, "tracking is limited")
        self.alerting.report("remark", self.remarks, step, prefix)

    def advance(self) -> None:
        """End the step; what is observed from now on belongs to the next one."""
        if self._pending:
            self.settle(wait=False)
        if self._reported != (names := len(self.unseen) + len(self.remarks)):
            self._reported = names
            self.report_unseen()
        step, clock = self.step_number, pipeline.clock
        # of two trackers that advance in turn, neither sets the clock back
        pipeline.advance(_OWNER, max(step + 1, clock.step or 0))
        self._own_step = step + 1
        # fixed now: when it is first needed, another tracker may have advanced the clock
        self._current = self._own_step if clock.owner == _OWNER else None
        if self._switched is not None:
            self.plan.restart(self._switched, self._own_step)
            self._switched = None
        self._begin_step()
        if self.alerting.looks:
            self.alerting.end_step(self.skipped)

    def _begin_step(self) -> None:
        """Work out what this step looks at."""
        plan = self.plan
        plan.begin_step(self._own_step)
        self.on = self.active and plan.on
        self.wants = self.could_want if plan.is_plain else plan.wants
        self._needs_values = self._always_values or plan.tensors

    def switch(self, every: int) -> None:
        """Select each n-th step from the next one on, or none."""
        self._switched = every

    @property
    def records(self) -> Iterator[Record]:
        """All records so far, in order of capture; from the run if one is open."""
        self.settle()
        yield from self.sent


def stashed(given: Any) -> tuple[list[tuple[Any, Any]], int]:
    """Return what a stash gave by name, and its bytes; dicts in it are flattened with dots.

    >>> stashed({"l1": 2, "scalar_stats": {"std": 0.5}, "bins": [3, 4]})[0]
    [('l1', 2.0), ('scalar_stats.std', 0.5), ('bins', Items(kind='list', items=(3, 4)))]
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"stash must return a dict, got {given!r:.80}")
    found: list[tuple[Any, Any]] = []
    total = 0
    for key, value in given.items():
        if isinstance(value, Mapping):
            inner, nbytes = stashed(value)
            found += [(f"{key}.{name}", each) for name, each in inner]
            total += nbytes
            continue
        if key in ("hist", "bins") and hasattr(value, "tolist"):
            value = value.tolist()  # columns of the LogFrame
        try:
            found.append((str(key), float(value)))
        except (TypeError, ValueError, RuntimeError):  # not a single number
            snapshot, nbytes = arrays.snapshot(value, pipeline.pool)
            found.append((str(key), snapshot))
            total += nbytes
    return found, total
