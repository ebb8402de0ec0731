"""What hooks and intercepted functions observe becomes records, step by step."""

from __future__ import annotations

import collections
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from tensortap import frameworks as arrays
from tensortap import ranks
from tensortap.alerts import Alert, AlertMonitor, record_of
from tensortap.frameworks.observing import Observed, never_skipped
from tensortap.frameworks.protocol import PendingSummary
from tensortap.pipeline.pipeline import pipeline
from tensortap.record import Kind, Record, Summary
from tensortap.record import Mapping as Pairs
from tensortap.sinks.connections import connections
from tensortap.sinks.memory import MemorySink
from tensortap.sources.patterns import NamePattern, Patterns, compile_pattern

log = logging.getLogger("tensortap")

Stash = Callable[[Any], Mapping[str, float]]
_OWNER = "tracker.step()"
_ALERTS = 1000  # that are remembered
_now = time.perf_counter_ns
_replace = msgspec.structs.replace


class TrackOptions(NamedTuple):
    """What is tracked; the arguments of `track`."""

    include: NamePattern = None
    exclude: NamePattern = None
    activations: bool = True
    gradients: bool = True
    weights: bool = True
    optimizer_state: bool = True
    every: int = 1
    stats: bool = True
    tensors: bool | str | re.Pattern[str] = False
    stash: Stash | None = None
    only_training: bool = True
    init_step: int | None = None
    alerts: Any = False
    on_alert: Any = None


class Pending(NamedTuple):
    """A record whose statistics a device is still working on."""

    record: Record
    nbytes: int
    later: PendingSummary


def _kinds_of(options: TrackOptions) -> frozenset[Kind]:
    """Return the kinds of records that the options switch on."""
    switches = {
        Kind.ACTIVATION: options.activations,
        Kind.GRADIENT: options.gradients,
        Kind.WEIGHT: options.weights,
        Kind.WEIGHT_GRADIENT: options.weights and options.gradients,
        Kind.OPTIMISER_STATE: options.optimizer_state,
    }
    return frozenset(kind for kind, on in switches.items() if on)


class Observer:
    """Turns observations into records; `advance` ends a training step."""

    def __init__(self, settings: TrackOptions) -> None:
        if settings.every < 1:
            raise ValueError(f"every={settings.every}: every first step or more, at least 1")
        self.settings = settings
        self.patterns = Patterns(settings.include, settings.exclude)
        self.only_training = settings.only_training
        self.kinds = _kinds_of(settings)
        self.fault = pipeline.fault
        self._whole = _tensors(settings.tensors)
        self._own = 0  # the step, unless somebody else owns the clock
        self._current: int | None = None  # the step that is under way
        self._begun = 0
        self.active = False
        self.on = False  # whether this step is one of every n
        self.skipped: Callable[[], bool] = never_skipped  # whether no optimizer took this step
        self.unseen: dict[str, str] = {}  # what could not be observed, and why
        self._said: set[str] = set()  # those of which the user has been told
        self._alerts: collections.deque[Alert] = collections.deque(maxlen=_ALERTS)
        self._pending: collections.deque[Pending] = collections.deque()
        self._memory = MemorySink()
        self._first_seq = 0
        self._last_seq = sys.maxsize
        self._mine: set[tuple[Kind, str]] = set()  # in a run there may be records of others
        self._run: Any = None
        self._lock = threading.RLock()  # records may be asked for while training goes on
        self.watcher: AlertMonitor | None = None
        if settings.alerts is not False and settings.alerts is not None:
            self.watcher = AlertMonitor(
                settings.alerts, on_alert=settings.on_alert, on_fault=pipeline.fault
            )
        elif settings.on_alert is not None:
            raise ValueError("on_alert= needs alerts=True, or a list of rules")

    # -- begin and end -------------------------------------------------------------------

    def begin(self) -> None:
        """Observe from here on."""
        from tensortap.sources import init as run

        self._run = run.opened()
        first = self.settings.init_step
        if first is None:
            # a second tracker goes on where the first one of a run has ended
            first = self._run.next_step if self._run is not None else 0
        self._own = self._begun = first
        pipeline.clock.begin(first)
        self._first_seq = pipeline.next_seq()
        self.active = True
        self.on = True

    def end(self) -> None:
        """Observe no more; what devices still work on is waited for."""
        self.active = self.on = False
        self.settle()
        self.say_unseen()
        self._last_seq = pipeline.next_seq()
        if self._run is not None:
            self._run.next_step = self._own
        pipeline.clock.release(_OWNER)

    # -- observing -----------------------------------------------------------------------

    @property
    def step_number(self) -> int:
        """The training step that is under way."""
        if self._current is None:
            held = pipeline.clock.step
            self._current = self._own if held is None else held
        return self._current

    @property
    def capturing(self) -> bool:
        """Return whether this step is one of every n, and capturing is enabled."""
        return self.on and pipeline.enabled

    def wants(self, kind: Kind, name: str) -> bool:
        """Return whether the options select a name of this kind."""
        return kind in self.kinds and self.patterns.wants(kind, name)

    def observe(
        self, observed: Observed, value: Any, step: int | None = None, stats: Summary | None = None
    ) -> Summary | None:
        """A tensor: its statistics, and itself if that is wanted, become a record.

        `stats` are its statistics, where they are known. Returns them, unless they come later.
        """
        start = _now()
        later = None
        if stats is None and self.settings.stats:
            stats, later = arrays.summary_of(value)
        self.add(observed, stats, later, value, step)
        pipeline.ledger.track(_now() - start)
        return stats

    def add(
        self,
        observed: Observed,
        stats: Summary | None,
        later: PendingSummary | None = None,
        value: Any = None,
        step: int | None = None,
    ) -> None:
        """Statistics that are there, or that a device is still working on: a record, or soon."""
        if step is None:
            step = self.step_number
        rank, world_size = ranks.rank_and_world_size()
        record = Record(
            observed.name, observed.kind, step, observed.call, pipeline.next_seq(), rank,
            world_size, time.time_ns(), observed.type, observed.dtype, observed.shape,
            observed.shard, None, None, stats, observed.tags,
        )  # fmt: skip
        nbytes = 0
        if value is not None:
            record, nbytes = self._with_value(record, value)
        if later is None:
            self._put(record, nbytes)
        else:
            self._pending.append(Pending(record, nbytes, later))

    def poll(self) -> None:
        """Make records of what devices are done with, in order, without waiting."""
        with self._lock:
            while self._pending and self._pending[0].later.ready():
                self._resolve(self._pending.popleft())

    def settle(self) -> None:
        """Wait for the devices."""
        with self._lock:
            while self._pending:
                self._resolve(self._pending.popleft())

    def _resolve(self, pending: Pending) -> None:
        try:
            stats = pending.later.resolve()
        except Exception as error:
            pipeline.fault(pending.record.name, error)
            return
        if stats is not None:
            self._put(_replace(pending.record, stats=stats), pending.nbytes)

    def metric(self, name: str, value: float, step: int | None = None) -> None:
        """A number about a step as a whole: the one that is under way, or another."""
        rank, world_size = ranks.rank_and_world_size()
        number, now = pipeline.next_seq(), time.time_ns()
        step = self.step_number if step is None else step
        self._put(Record(name, Kind.METRIC, step, 0, number, rank, world_size, now,
                         "builtins.float", value=value), 0)  # fmt: skip

    def _with_value(self, record: Record, value: Any) -> tuple[Record, int]:
        """The record with what the user's stash says of the tensor, or with the tensor itself."""
        extra: list[tuple[Any, Any]] = []
        if self.settings.stash is not None:
            try:
                found = self.settings.stash(value)
                extra = [(str(key), float(number)) for key, number in found.items()]
            except Exception as error:
                pipeline.fault(record.name, error)
        if not self._wants_whole(record):
            return (_replace(record, value=Pairs(tuple(extra))), 0) if extra else (record, 0)
        neutral, nbytes = arrays.snapshot(value, pipeline.pool)
        if extra:
            neutral = Pairs((("tensor", neutral), *extra))
            return _replace(record, value=neutral, tags={**record.tags, "stash": "1"}), nbytes
        return _replace(record, value=neutral), nbytes

    def _put(self, record: Record, nbytes: int) -> None:
        self._hand_on(record, nbytes)
        if self.watcher is not None:
            for alert in self.watcher.see(record):
                self._alert(alert, record.world_size)

    def _alert(self, alert: Alert, world_size: int) -> None:
        self._alerts.append(alert)
        number, now = pipeline.next_seq(), time.time_ns()
        self._hand_on(record_of(alert, seq=number, time_ns=now, world_size=world_size), 0)

    def say_unseen(self) -> None:
        """Tell the user, and the run, what has turned out not to be seen."""
        new = [name for name in self.unseen if name not in self._said]
        if not new:
            return
        self._said.update(new)
        names = ", ".join(new[:5]) + (" …" if len(new) > 5 else "")
        why = "; ".join(sorted({self.unseen[name] for name in new}))
        count = "1 module" if len(new) == 1 else f"{len(new)} modules"
        log.warning("tensortap: the outputs of %s are not seen (%s): %s", count, names, why)
        rank, world_size = ranks.rank_and_world_size()
        for name in new:
            message = f"the output is not seen: {self.unseen[name]}"
            step = self.step_number
            self._alert(
                Alert("unseen", name, Kind.ACTIVATION, step, rank, name, message), world_size
            )

    def _wants_whole(self, record: Record) -> bool:
        if self._whole is not None and self._whole.search(record.name):
            return True
        return self.watcher is not None and self.watcher.keep(record.step, record.rank)

    def _hand_on(self, record: Record, nbytes: int) -> None:
        if self._run is None:
            self._memory.keep(record)
        else:
            self._mine.add((record.kind, record.name))
        if not connections.tried:
            connections.connect()
        pipeline.put(record, nbytes)

    # -- steps ---------------------------------------------------------------------------

    def advance(self) -> None:
        """The step is over: whatever comes now belongs to the next one."""
        self.poll()
        self.say_unseen()
        step = self.step_number
        # of two trackers that take turns neither sets the other back
        pipeline.advance(_OWNER, max(step + 1, pipeline.clock.step or 0))
        self._own = step + 1
        # counted here: by the time it is first asked for, another tracker may have gone on
        self._current = self._own if pipeline.clock.owner == _OWNER else None
        self.on = self.active and (self._own - self._begun) % self.settings.every == 0
        if self.watcher is not None:
            self.watcher.check(self.skipped)

    # -- what was observed ---------------------------------------------------------------

    @property
    def records(self) -> Iterator[Record]:
        """All records so far, in the order of capture; from the run, if one is open."""
        self.settle()
        if self._run is None:
            yield from self._memory.records
            return
        pipeline.flush(30)
        from tensortap.readers.run import RunReader

        reader = RunReader(self._run.path)
        rank = ranks.rank_and_world_size()[0]
        for record in reader.new_records():
            here = record.rank == rank and self._first_seq <= record.seq < self._last_seq
            if here and (record.kind, record.name) in self._mine:
                yield reader.load(record)

    @property
    def alerts(self) -> list[Alert]:
        """The alerts so far."""
        return list(self._alerts)


def _tensors(wanted: bool | str | re.Pattern[str]) -> re.Pattern[str] | None:
    if wanted is False or wanted is None:
        return None
    return compile_pattern("tensors", "" if wanted is True else wanted)
