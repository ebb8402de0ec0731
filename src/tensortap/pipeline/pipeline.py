"""The session of this process: where a value becomes a record and goes to the sinks."""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from tensortap import frameworks as arrays
from tensortap import ranks
from tensortap.buffers import OutOfMemory, Pool
from tensortap.frameworks.protocol import SMALL, Adapter, type_name
from tensortap.frameworks.snapshot import adapter_of
from tensortap.history import OVERHEAD
from tensortap.limits import parse_size
from tensortap.pipeline import ticket as tickets
from tensortap.pipeline.fast import ARRAY, FLOAT, TAKE
from tensortap.pipeline.receipt import Receipt
from tensortap.pipeline.ticket import SKIPPED, Ticket
from tensortap.record import Kind, Record, Shard, TensorData, Value
from tensortap.select import Clock, Gate, Gates
from tensortap.sinks.sink import Sink
from tensortap.wire.address import Address, parse_address

log = logging.getLogger("tensortap")

_T = TypeVar("_T")

_now = time.perf_counter_ns
_BILLS = 4096  # that may wait to be added up
_type_name: Callable[[type], str] = functools.lru_cache(4096)(type_name)
EXIT = 2.0  # seconds that the end of the program may wait for what is under way


class Pipeline:
    """Gates, clock, pool and sinks of one process; a forked child gets fresh ones."""

    def __init__(self) -> None:
        self.enabled = not _flag("TENSORTAP_DISABLE")
        self._inherited: list[Any] = []
        self._fresh()
        # a fork while another thread imports would leave the child with a lock for ever locked
        self._importing = threading.RLock()
        os.register_at_fork(
            before=self._importing.acquire,
            after_in_parent=self._importing.release,
            after_in_child=self._after_fork,
        )

    def _fresh(self) -> None:
        self.gates = Gates()
        self.clock = Clock()
        self.strict = _flag("TENSORTAP_STRICT")
        self.pool = Pool()
        self.id = os.urandom(16)
        self._next = itertools.count().__next__  # the order of capture
        self.settlers: list[Callable[[], object]] = []
        self._bills: collections.deque[tuple[int, int, int, int, int]] = collections.deque()
        self._passes: collections.deque[int] = collections.deque()
        self._bill = self._bills.append
        self._small_bills: collections.deque[tuple[int, int]] = collections.deque()
        self._small_bill = self._small_bills.append
        self._tracked: collections.deque[int] = collections.deque()
        self._tracking = self._tracked.append
        self._lock = threading.Lock()
        self._sinks: tuple[Sink, ...] = ()  # all but the live ones
        self._endings: dict[int, Callable[[], None]] = {}
        self._lives: dict[Address, Any] = {}
        self._targets: tuple[Sink, ...] = ()
        self._classes: dict[type, tuple[int, str, object]] = {}
        self._dtypes: dict[object, str] = {}
        self._target: Sink | None = None
        self._hot: Any = None
        self._default: Address | None = None
        self._addresses: dict[str | None, Address] = {}
        self._registered = False
        self._closed = False
        # what the receipt is made of
        self._captured = self._bytes = self._unheard = self._errors = self._failed = (
            self._dropped
        ) = 0
        self._observed = 0
        self._uncalled = (
            itertools.count()
        )  # values and errors that came by no gate: no calls of one
        self._spent = dict.fromkeys(
            ("select", "queue", "copy", "small values", "connecting", "tracking"), 0
        )
        self._faults: set[tuple[str, str]] = set()
        self._steps = 0
        self._misses = {name: itertools.count() for name in ("unheard", "disabled")}
        self._warned_owner = self._warned_server = False
        self._refresh()

    def _after_fork(self) -> None:
        # kept, not closed: sockets and threads of the parent must not be touched here
        self._inherited.append(dict(self.__dict__, _inherited=None))
        tickets.after_fork()
        self._fresh()
        self._importing.release()

    # -- switches ------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Work out whether a value that is caught now has anywhere to go."""
        with self._lock:
            sinks = list(self._sinks)
            if self._default is not None:
                sinks.append(self._lives[self._default])
            self._targets = tuple(sink for sink in sinks if sink.accepting)
            # before the first catch nobody knows yet whether a live session is there
            unknown = self._default is None and not self._closed
            self.on = self.enabled and (unknown or bool(self._targets))
            self.hot = self._fast_way()
            self.miss: Callable[[], int] = self._misses[
                "unheard" if self.enabled else "disabled"
            ].__next__

    def _fast_way(self) -> Callable[..., Ticket | None] | None:
        """The way in for small values, where all records go into one queue."""
        if not self.on or len(self._targets) != 1 or self._default is None:
            return None
        if self._target is not self._targets[0]:
            self._target = self._targets[0]
            make = getattr(self._target, "fast", None)
            self._hot = make and make(
                record=Record,
                tensor=TensorData,
                kind=Kind.VALUE,
                classes=self._classes,
                dtypes=self._dtypes,
                ranks=ranks.rank_and_world_size,
                next=self._next,
                small=SMALL,
            )
        found: Callable[..., Ticket | None] | None = self._hot
        return found

    def _learn(self, value: Any, adapter: Adapter, neutral: Value) -> None:
        """Let values of this class go the fast way from here on."""
        cls = type(value)
        if cls is float:
            self._classes[cls] = (FLOAT, _type_name(cls), None)
        elif type_name(cls) == "numpy.ndarray" and isinstance(neutral, TensorData):
            self._dtypes[value.dtype] = neutral.dtype
            self._classes[cls] = (ARRAY, _type_name(cls), None)
        elif adapter.take_small is not None:
            self._classes[cls] = (TAKE, _type_name(cls), adapter.take_small)

    def switch(self, enabled: bool) -> None:
        """Turn all capturing on or off."""
        self.enabled = enabled
        self._refresh()

    def add_sink(self, sink: Sink, on_close: Callable[[], None] | None = None) -> None:
        """Give all records from here on to this sink as well; `on_close` ends it."""
        self._register_exit()
        self._sinks += (sink,)
        if on_close is not None:
            self._endings[id(sink)] = on_close
        self._refresh()

    def remove_sink(self, sink: Sink) -> None:
        """Give it no more records."""
        self._sinks = tuple(s for s in self._sinks if s is not sink)
        self._endings.pop(id(sink), None)
        meter = getattr(sink, "meter", None)
        if meter is not None:
            # its bill stays when it is gone
            with self._lock:
                self._captured += meter.captured
                self._bytes += meter.nbytes
                self._spent["small values"] += meter.spent_ns
                self._dropped += sink.dropped  # type: ignore[attr-defined]
        self._refresh()

    def advance(self, owner: str, step: int | None = None) -> int | None:
        """Advance the step, if `owner` owns it; the step that holds now."""
        self._settle()
        before = self.clock.step
        if not self.clock.advance(owner, step):
            if not self._warned_owner:
                self._warned_owner = True
                log.warning(
                    "tensortap: the step is advanced by %s; what %s says of it is ignored",
                    self.clock.owner,
                    owner,
                )
        elif step is None:
            self._steps += 1
        elif before is not None:
            self._steps += max(0, step - before)
        return self.clock.step

    def restart(self) -> None:
        """Count steps and calls from zero again: the next run is not the last one's rest."""
        self.clock.restart()
        for gate in list(self.gates.values()):
            gate.restart()

    # -- capturing -----------------------------------------------------------------------

    def capture(
        self,
        value: object,
        gate: Gate,
        number: int,
        when: object = True,
        changed: bool = False,
        server: str | None = None,
        *,
        kind: Kind = Kind.VALUE,
        tags: dict[str, str] | None = None,
        shard: Shard | None = None,
    ) -> Ticket:
        """Make a record of call `number` of this gate and hand it on; nothing else is kept."""
        start = _now()
        if not self.enabled or self._closed:
            self.miss()
            return SKIPPED
        if when is not True and not (when(value) if callable(when) else when):
            return self._passed(start)
        if server is not None or self._default is None:
            targets = self._targets_for(server)
            self._spent["connecting"] += _now() - start
            start = _now()
        else:
            targets = self._targets
        if not targets:
            self.miss()
            return SKIPPED
        adapter = adapter_of(type(value))
        if adapter.local is not None:
            value, shard = adapter.local(value)
            adapter = adapter_of(type(value))
        digest = None
        if changed:
            digest = arrays.digest_of(value)
            if not gate.differs(digest):
                return self._passed(start)
        cls = type(value)
        nbytes = adapter.nbytes(value, ())
        selected = _now() if nbytes > SMALL else 0
        admitted: tuple[Sink, ...] = targets
        if len(targets) > 1 or not targets[0].admit(nbytes, gate.name, kind):
            admitted = self._admitted(targets, gate, number, kind, nbytes)
        if not admitted:
            gate.digest = None  # it was not kept: the next one is to be
            return self._passed(start)
        room = _now() if nbytes > SMALL else 0
        try:
            neutral, _ = adapter.take(value, self.pool, ())
        except BaseException:
            gate.digest = None
            raise
        copied = _now() if nbytes > SMALL else 0
        dtype: str = ""
        shape: tuple[int, ...] = ()
        if type(neutral) is TensorData:
            dtype, shape = neutral.dtype, neutral.shape
        step = gate.step
        rank, world_size = ranks.rank_and_world_size()
        record = Record(
            gate.name,
            kind,
            number if step is None else step,
            0 if step is None else number - gate.base,
            self._next(),
            rank,
            world_size,
            time.time_ns(),
            _type_name(cls),
            dtype,
            shape,
            shard,
            digest,
            neutral,
            None,
            tags or {},
        )
        ticket = Ticket(len(admitted), admitted[-1].hurry, _sinks=len(admitted))
        for sink in admitted:
            sink.write(record, ticket, nbytes)
        # one append, added up later: a lock here would cost more than the rest
        if self.hot is not None and nbytes <= SMALL:
            self._learn(value, adapter, neutral)
        if nbytes > SMALL:
            self._bill((nbytes, selected - start, room - selected, copied - room, _now() - copied))
        else:
            self._small_bill((nbytes, _now() - start))
        if len(self._bills) + len(self._small_bills) > _BILLS:
            self._add_up()
        return ticket

    def put(self, record: Record, nbytes: int = 0) -> Ticket:
        """Hand on a record that is complete, of a source that made it itself."""
        if self._default is None and self.enabled and not self._closed:
            self._targets_for(None)
        targets = self._targets if self.enabled and not self._closed else ()
        admitted = [sink for sink in targets if sink.admit(nbytes, record.name, record.kind)]
        for sink in targets:
            if sink not in admitted:
                sink.missed(record.name, record.kind, record.step, record.rank)
        if not admitted:
            return SKIPPED
        ticket = Ticket(len(admitted), admitted[-1].hurry, _sinks=len(admitted))
        for sink in admitted:
            sink.write(record, ticket, nbytes)
        return ticket

    def bill(self, ns: int) -> None:
        """A tensor was observed; it took the training thread so long."""
        self._tracking(ns)
        if len(self._tracked) > _BILLS:
            self._add_up()

    def put_copy(self, record: Record, nbytes: int, start: int) -> None:
        """Hand on a record of a copied value: it counts as captured. `start` is when it began."""
        if self._default is None and self.enabled and not self._closed:
            began = _now()
            self._targets_for(None)
            self._spent["connecting"] += _now() - began
            start += _now() - began
        ticket = self.put(record, nbytes)
        next(self._uncalled)
        if ticket is not SKIPPED:
            self._small_bill((nbytes, _now() - start))
            if len(self._small_bills) > _BILLS:
                self._add_up()
        elif not self._targets:
            self.miss()

    def _admitted(
        self, targets: tuple[Sink, ...], gate: Gate, number: int, kind: Kind, nbytes: int
    ) -> tuple[Sink, ...]:
        """The sinks that have room; the others are told what they miss."""
        if len(targets) == 1:
            admitted: list[Sink] = []  # it was asked already
        else:
            admitted = [sink for sink in targets if sink.admit(nbytes, gate.name, kind)]
        for sink in targets:
            if sink not in admitted:
                step = number if gate.step is None else gate.step
                sink.missed(gate.name, kind, step, ranks.rank_and_world_size()[0])
        return tuple(admitted)

    def _passed(self, start: int) -> Ticket:
        self._passes.append(_now() - start)
        if len(self._passes) > _BILLS:
            self._add_up()
        return SKIPPED

    def _add_up(self) -> None:
        """Add the bills to the totals; called from time to time, so that they do not gather."""
        with self._lock:
            bills = [self._bills.popleft() for _ in range(len(self._bills))]
            self._spent["select"] += sum([self._passes.popleft() for _ in range(len(self._passes))])
            small = [self._small_bills.popleft() for _ in range(len(self._small_bills))]
            if small:
                nbytes, spent = zip(*small, strict=True)
                self._captured += len(small)
                self._bytes += sum(nbytes)
                self._spent["small values"] += sum(spent)
            tracked = [self._tracked.popleft() for _ in range(len(self._tracked))]
            self._observed += len(tracked)
            self._spent["tracking"] += sum(tracked)
            if bills:
                nbytes, select, admit, copy, write = zip(*bills, strict=True)
                self._captured += len(bills)
                self._bytes += sum(nbytes)
                self._spent["select"] += sum(select)
                self._spent["queue"] += sum(admit) + sum(write)
                self._spent["copy"] += sum(copy)

    def _settle(self) -> None:
        """Wait for values that are still being computed and belong to the step so far."""
        for wait in self.settlers:
            with contextlib.suppress(Exception):  # a computation that failed tells its user itself
                wait()

    def next_number(self) -> int:
        """The next number in the order of capture."""
        return self._next()

    def fault(
        self, name: object, error: Exception, what: str = "was not caught", *, called: bool = False
    ) -> Ticket:
        """Something went wrong under a name: counted, logged once, raised only if asked for.

        `called` says that it was a call of a gate, which has counted it.
        """
        if self.strict:
            raise error
        if not called:
            next(self._uncalled)
        with self._lock:
            self._errors += 1
            key = (str(name), type(error).__name__)
            known = key in self._faults
            self._faults.add(key)
        if isinstance(error, OutOfMemory):
            self._refresh()
        if not known:
            why = f"{type(error).__name__}: {error}" if str(error) else repr(error)
            log.warning("tensortap: %r %s: %s", name, what, why)
        return SKIPPED

    # -- live sessions -------------------------------------------------------------------

    def _targets_for(self, server: str | None) -> tuple[Sink, ...]:
        """The sinks of a value that is to go to another server than the usual one."""
        address = self._addresses.get(server)
        if address is None:
            try:
                address = self._addresses[server] = parse_address(server)
            except ValueError as error:
                if server is not None or not self._sinks or self.strict:
                    raise
                # a mistake in the environment must not cost the run a value
                if not self._warned_server:
                    self._warned_server = True
                    log.warning("tensortap: TENSORTAP_SERVER: %s; nothing goes there", error)
                return tuple(sink for sink in self._sinks if sink.accepting)
        live = self._lives.get(address) or self._connect(address)
        if server is None:
            self._default = address
            self._refresh()
            return self._targets
        sinks = (*self._sinks, live)
        return tuple(sink for sink in sinks if sink.accepting)

    def _connect(self, address: Address) -> Any:
        with self._importing:
            from tensortap.pipeline.queue import Background
            from tensortap.sinks.live import Live
            from tensortap.wire import messages as wire

        self._register_exit()
        with self._lock:
            if address in self._lives:
                return self._lives[address]

            def forget_or_refresh(forget: bool) -> None:
                if forget:
                    with self._lock:  # its thread may get here before its maker has gone on
                        live = self._lives[address]
                    # what another sink took as well was heard: it is in the run
                    lost = [entry for entry in live.forget(unheard=True) if not entry[1].shared]
                    # what was tracked is counted as that, and not among what was captured
                    sizes = [
                        nbytes - OVERHEAD
                        for record, _, nbytes in lost
                        if record.stats is None and record.kind is not Kind.ALERT
                    ]
                    for _ in range(len(lost) - len(sizes)):
                        next(self._uncalled)
                    with self._lock:
                        self._unheard += len(lost)
                        self._captured -= len(sizes)
                        self._bytes -= sum(sizes)
                self._refresh()

            def refused(count: int) -> None:
                with self._lock:
                    self._failed += count

            def tally() -> wire.Tally:
                self._add_up()
                counts = self._counts()
                with self._lock:
                    live = self._lives[address]
                return wire.Tally(counts["unheard"], live.dropped, counts["failed"])

            drain = Live(
                address,
                self.pool,
                client=self.introduce,
                tally=tally,
                on_state=forget_or_refresh,
                on_refused=refused,
                arena=not _flag("TENSORTAP_NO_ARENA"),
            )
            live = Background(
                drain,
                budget=setting("TENSORTAP_BUFFER", "10%", parse_size),
                overflow=setting("TENSORTAP_OVERFLOW", "latest", _policy),
                name=f"live-{address}",
            )
            self._lives[address] = live
            return live

    def introduce(self) -> Any:
        """What a server is told about this process."""
        from tensortap.wire import messages as wire

        rank, world_size = ranks.rank_and_world_size()
        program = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"
        return wire.Client(self.id, os.uname().nodename, os.getpid(), rank, world_size, program)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything that was captured has arrived or is known to be lost."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._settle()
        done = True
        for sink in (*self._sinks, *self._lives.values()):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            done = sink.flush(left) and done
        return done

    def _register_exit(self) -> None:
        if not self._registered:
            self._registered = True
            atexit.register(self.close)
            process = sys.modules.get("multiprocessing.process")
            if process is not None and process.parent_process() is not None:
                # a worker of multiprocessing leaves without atexit; not registered before it
                # runs, as it forgets at its start what it had inherited
                sys.modules["multiprocessing.util"].Finalize(None, self.close, exitpriority=10)

    def close(self) -> None:
        """Flush for at most two seconds and end all sinks; catching is off from here on."""
        if self._closed:
            return
        self._settle()
        self._closed = True
        self.on = False
        deadline = time.monotonic() + EXIT
        sinks = (*self._sinks, *self._lives.values())
        for sink in sinks:
            end = self._endings.get(id(sink))
            with contextlib.suppress(Exception):
                if end is not None:
                    end()
                else:
                    sink.close(max(0.05, deadline - time.monotonic()))
        self._refresh()

    # -- the receipt ---------------------------------------------------------------------

    def _counts(self) -> dict[str, int]:
        unheard = int(repr(self._misses["unheard"])[6:-1])
        return {"unheard": unheard + self._unheard, "failed": self._failed}

    def receipt(self) -> Receipt:
        """What was captured, what was not and why, and what it cost the training thread."""
        self._add_up()
        calls = sum(gate.calls for gate in list(self.gates.values()))
        lives = list(self._lives.items())
        with self._lock:
            counts = self._counts()
            queues: list[Any] = [s for s in self._sinks if hasattr(s, "meter")]
            queues += [live for _, live in lives]
            dropped = self._dropped + sum(queue.dropped for queue in queues)
            meters = [queue.meter for queue in queues]
            captured = self._captured + sum(meter.captured for meter in meters)
            nbytes = self._bytes + sum(meter.nbytes for meter in meters)
            errors = self._errors
            spent = {name: value / 1e9 for name, value in self._spent.items()}
            spent["small values"] += sum(meter.spent_ns for meter in meters) / 1e9
        # a value that was replaced in the queue had been captured: it is counted once, below
        kept = max(0, captured - sum(queue.replaced for queue in queues))
        uncalled = int(repr(self._uncalled)[6:-1])
        skipped = max(0, calls + uncalled - kept - dropped - counts["unheard"] - errors)
        spent["skipping"] = skipped * _cost_of_skipping()
        seconds = sum(spent.values())
        steps = self._steps
        if not steps and self.clock.step is None and self.gates:
            steps = max(gate.calls for gate in list(self.gates.values()))
        return Receipt(
            captured=kept,
            tracked=self._observed,
            skipped=skipped,
            dropped=dropped,
            unheard=counts["unheard"],
            failed=counts["failed"] + sum(queue.lost for queue in queues),
            errors=errors,
            bytes=nbytes,
            steps=steps,
            seconds=seconds,
            seconds_per_step=seconds / steps if steps else 0.0,
            where=spent,
            sessions={str(a): live.drain.describe() for a, live in lives},
        )


def _cost_of_skipping() -> float:
    """Seconds that one skipped call takes, measured here and now."""
    gate, rounds = Gate("cost"), 2000
    start = _now()
    for _ in range(rounds):
        if gate.tick() % 7 and gate.step != 1:
            continue
    return (_now() - start) / rounds / 1e9


def setting(name: str, default: str, parse: Callable[[str], _T]) -> _T:
    """What the environment says; a mistake there is said, and must not end the capturing."""
    try:
        return parse(os.environ.get(name) or default)
    except ValueError as error:
        log.warning("tensortap: %s: %s; it is %s", name, error, default)
        return parse(default)


def _policy(text: str) -> str:
    if text not in ("latest", "block"):
        raise ValueError(f"not a policy: {text!r}; it is 'latest' or 'block'")
    return text


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


pipeline = Pipeline()
