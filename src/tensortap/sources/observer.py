"""What hooks and intercepted functions observe becomes records, step by step."""

from __future__ import annotations

import collections
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tensortap import arrays, ranks
from tensortap.alerts import Watcher, record_of
from tensortap.record import Kind, Record, Shard, Summary
from tensortap.record import Mapping as Pairs
from tensortap.session import session
from tensortap.sources.patterns import Patterns, Wanted, compiled

if TYPE_CHECKING:
    from tensortap.alerts import Alert

log = logging.getLogger("tensortap")

Stash = Callable[[Any], Mapping[str, float]]
_OWNER = "tracker.step()"
_now = time.perf_counter_ns


class Settings(NamedTuple):
    """What is tracked; the arguments of `track`."""

    include: Wanted = None
    exclude: Wanted = None
    activations: bool = True
    gradients: bool = True
    weights: bool = True
    optimizer_state: bool = True
    every: int = 1
    stats: bool = True
    tensors: bool | str | re.Pattern[str] = False
    stash: Stash | None = None
    only_training: bool = True
    init_step: int = 0
    alerts: Any = False
    on_alert: Any = None


class Seen(NamedTuple):
    """One tensor that was observed: what it is, apart from its values."""

    name: str
    kind: Kind
    call: int = 0
    type: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    shard: Shard | None = None
    tags: dict[str, str] = {}  # noqa: RUF012  never changed


class Pending(NamedTuple):
    """A summary that a device is still working on."""

    seen: Seen
    step: int
    seq: int
    time_ns: int
    ready: Callable[[], bool]
    resolve: Callable[[], Summary | None]


class Observer:
    """Turns observations into records; `advance` ends a training step."""

    def __init__(self, settings: Settings) -> None:
        if settings.every < 1:
            raise ValueError(f"every={settings.every}: every first step or more, at least 1")
        self.settings = settings
        self.patterns = Patterns(settings.include, settings.exclude)
        self._whole = _tensors(settings.tensors)
        self._own = settings.init_step  # the step, unless somebody else owns the clock
        self._current: int | None = None  # the step that is under way
        self._begun = settings.init_step
        self.active = False
        self.on = False  # whether this step is one of every n
        self.unseen: dict[str, str] = {}  # what could not be observed, and why
        self._pending: collections.deque[Pending] = collections.deque()
        self._kept: list[Record] = []
        self._first_seq = 0
        self._run: Any = None
        self._lock = threading.RLock()
        self.watcher: Watcher | None = None
        if settings.alerts is not False and settings.alerts is not None:
            self.watcher = Watcher(settings.alerts, on_alert=settings.on_alert)
        elif settings.on_alert is not None:
            raise ValueError("on_alert= needs alerts=True, or a list of rules")

    # -- begin and end -------------------------------------------------------------------

    def begin(self) -> None:
        """Observe from here on."""
        from tensortap.sources import run

        self._run = run.opened()
        session.clock.begin(self.settings.init_step)
        self._first_seq = session.next_number()
        self.active = True
        self.on = True

    def end(self) -> None:
        """Observe no more; what devices still work on is waited for."""
        self.active = self.on = False
        self.settle()
        session.clock.release(_OWNER)

    # -- observing -----------------------------------------------------------------------

    @property
    def step_number(self) -> int:
        """The training step that is under way."""
        if self._current is None:
            held = session.clock.step
            self._current = self._own if held is None else held
        return self._current

    def observe(self, seen: Seen, value: Any, step: int | None = None) -> None:
        """A tensor: its statistics, and itself if that is wanted, become a record."""
        start = _now()
        if step is None:
            step = self.step_number
        extra = self._stashed(seen, value)
        number, now = session.next_number(), time.time_ns()
        later = None
        stats = None
        if self.settings.stats:
            stats, later = arrays.summary_of(value)
        if later is None:
            self._put(seen, step, number, now, stats, value, extra)
        else:
            self._pending.append(Pending(seen, step, number, now, later.ready, later.resolve))
        session.bill(_now() - start)

    def expect(
        self, seen: Seen, ready: Callable[[], bool], resolve: Callable[[], Summary | None]
    ) -> None:
        """A tensor that a device is reducing: the record comes when it is done."""
        pending = Pending(
            seen, self.step_number, session.next_number(), time.time_ns(), ready, resolve
        )
        self._pending.append(pending)

    def poll(self) -> None:
        """Make records of what devices are done with, in order, without waiting."""
        while self._pending and self._pending[0].ready():
            self._resolve(self._pending.popleft())

    def settle(self) -> None:
        """Wait for the devices."""
        while self._pending:
            self._resolve(self._pending.popleft())

    def _resolve(self, pending: Pending) -> None:
        try:
            stats = pending.resolve()
        except Exception as error:
            session.fault(pending.seen.name, error)
            return
        if stats is not None:
            self._put(pending.seen, pending.step, pending.seq, pending.time_ns, stats)

    def metric(self, name: str, value: float) -> None:
        """A number about the step as a whole."""
        self._put(
            Seen(name, Kind.METRIC), self.step_number, session.next_number(), time.time_ns(),
            None, None, float(value),
        )  # fmt: skip

    def _stashed(self, seen: Seen, value: Any) -> Pairs | None:
        stash = self.settings.stash
        if stash is None:
            return None
        try:
            found = stash(value)
            return Pairs(tuple((str(key), float(number)) for key, number in found.items()))
        except Exception as error:
            session.fault(seen.name, error)
            return None

    def _put(
        self,
        seen: Seen,
        step: int,
        seq: int,
        time_ns: int,
        stats: Summary | None,
        tensor: Any = None,
        value: Any = None,
    ) -> None:
        rank, world_size = ranks.rank_and_world_size()
        record = Record(
            seen.name, seen.kind, step, seen.call, seq, rank, world_size, time_ns, seen.type,
            seen.dtype, seen.shape, seen.shard, None, value, stats, seen.tags,
        )  # fmt: skip
        nbytes = 0
        if tensor is not None and self._wants_whole(record):
            record, nbytes = self._with_tensor(record, tensor)
        self._hand_on(record, nbytes)
        if self.watcher is not None:
            for alert in self.watcher.see(record):
                number = session.next_number()
                said = record_of(alert, seq=number, time_ns=time.time_ns(), world_size=world_size)
                self._hand_on(said, 0)

    def _wants_whole(self, record: Record) -> bool:
        if self._whole is not None and self._whole.search(record.name):
            return True
        return self.watcher is not None and self.watcher.keep(record.step, record.rank)

    def _with_tensor(self, record: Record, tensor: Any) -> tuple[Record, int]:
        import msgspec

        neutral, nbytes = arrays.snapshot(tensor, session.pool)
        return msgspec.structs.replace(record, value=neutral), nbytes

    def _hand_on(self, record: Record, nbytes: int) -> None:
        if self._run is None:
            self._kept.append(record)
        session.put(record, nbytes)

    # -- steps ---------------------------------------------------------------------------

    def advance(self) -> None:
        """The step is over: whatever comes now belongs to the next one."""
        self.poll()
        step = self.step_number
        session.advance(_OWNER, step + 1)
        self._own = step + 1
        self._current = None
        self.on = self.active and (self._own - self._begun) % self.settings.every == 0
        if self.watcher is not None:
            self.watcher.check()

    # -- what was observed ---------------------------------------------------------------

    @property
    def records(self) -> Iterator[Record]:
        """All records so far, in the order of capture; from the run, if one is open."""
        self.settle()
        if self._run is None:
            yield from list(self._kept)
            return
        session.flush(30)
        from tensortap.readers.run import RunReader

        reader = RunReader(self._run.path)
        rank = ranks.rank_and_world_size()[0]
        for record in reader.fresh():
            if record.rank == rank and record.seq >= self._first_seq and record.kind in _TRACKED:
                yield reader.load(record)

    @property
    def alerts(self) -> list[Alert]:
        """The alerts so far."""
        return list(self.watcher.alerts) if self.watcher is not None else []


_TRACKED = frozenset(Kind) - {Kind.VALUE, Kind.LOCAL}


def _tensors(wanted: bool | str | re.Pattern[str]) -> re.Pattern[str] | None:
    if wanted is False or wanted is None:
        return None
    return compiled("tensors", "" if wanted is True else wanted)
