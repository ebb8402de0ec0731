"""Compare the replicas of ranks while they train, through a store that all of them share.

Every n-th step, each rank computes the digests of its replicas in the training thread; a thread of
our own sends them. The first rank of each group reads them and votes. Nobody waits for anybody: a
rank that is late is compared later, a rank that has died is left out. In a job without a store, the
digests become records, and the live session or the reader of the run votes.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import msgspec
import xxhash

from tensortap import frameworks as arrays
from tensortap import ranks as job
from tensortap.alerts import Alert
from tensortap.alerts.alert import module_of
from tensortap.alerts.ballots import BALLOT, Ballot, value_of_ballot
from tensortap.alerts.vote import (
    BatchVote,
    GroupDigests,
    GroupKey,
    ReplicaLayout,
    ReplicaMessage,
    ReplicaVote,
    vote_of,
)
from tensortap.errors import TensortapError
from tensortap.frameworks.observing import STAGE, Observed, RankStore, ReplicatedTensor
from tensortap.frameworks.protocol import PendingDigest
from tensortap.frameworks.registry import loaded_frameworks
from tensortap.pipeline.pipeline import pipeline
from tensortap.record import Kind, Record, TensorData
from tensortap.sources.replica_values import (
    ReplicaAnswers,
    ReplicaQuestions,
    WantedTensor,
    copy_of,
)
from tensortap.stats.shard_digest import sums_of

log = logging.getLogger("tensortap")

_QUEUED = 8  # steps that wait to be sent
_STORED = 16  # steps of a rank that stay in the store
_PATIENCE = 60.0  # seconds for which a rank may be late
_LAST_PATIENCE = 5.0  # at the end of training
_LAYOUTS_EVERY = 16  # ballots
_POLLS = 0.01, 0.2  # seconds between two looks, at first and later
# how many checks there were of the same tensors: all ranks count alike
_numbers: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)


OpenExchange: TypeAlias = Callable[[str], "ReplicaExchange | BallotRecords"]
_Tensors: TypeAlias = list[tuple[ReplicaLayout, bytes | PendingDigest]]
_Groups: TypeAlias = dict[GroupKey, _Tensors]
_Sent: TypeAlias = tuple[int, _Groups, TensorData | None]
_encode = msgspec.msgpack.encode
_decode_message = msgspec.msgpack.Decoder(ReplicaMessage).decode
_decode_layouts = msgspec.msgpack.Decoder(tuple[ReplicaLayout, ...]).decode


class ReplicaCheck:
    """Compares replicas every n-th step; `wants` selects tensors by kind and name.

    `record` takes the digests of a job whose ranks share no store.
    """

    def __init__(
        self,
        every: int,
        wants: Callable[[Kind, str], bool],
        record: Callable[[Record], object],
    ) -> None:
        self._every = every
        self._wants = wants
        self._record = record
        self._open: OpenExchange | None = None
        self._queue: queue.Queue[_Sent | None] = queue.Queue(_QUEUED)
        self._thread: threading.Thread | None = None
        self._exchange: ReplicaExchange | BallotRecords | None = None
        self._alerts: collections.deque[Alert] = collections.deque()

    def begin(self) -> None:
        """Look for a store that the ranks share; without one, make records."""
        found = (each.open_store() for each in loaded_frameworks())
        open_store = next((each for each in found if each is not None), None)
        if open_store is not None:
            self._open = lambda name: ReplicaExchange(open_store(name), self._alerts.append)
        elif job.rank_and_world_size()[1] > 1:
            self._open = lambda name: BallotRecords(name, self._record)

    def due(self, step: int) -> bool:
        """Return whether replicas are compared in this step."""
        return self._open is not None and step % self._every == 0

    def compare(self, step: int, found: Iterable[ReplicatedTensor], prefix: str = "") -> None:
        """Compute the digests of the tensors and send them."""
        groups: _Groups = {}
        last: Any = None
        digest: bytes | PendingDigest | None = None
        wanted = None if self._exchange is None else self._exchange.wanted
        copied: TensorData | None = None
        for observed, value, ranks, certain, distinct in found:
            if self._wants(observed.kind, observed.name):
                is_digest = isinstance(value, (bytes, PendingDigest))
                if value is not last:  # a tensor may belong to several groups
                    shard = observed.shard
                    last, digest = (
                        value,
                        value if is_digest else arrays.shard_digest_of(value, shard),
                    )
                if digest is not None:
                    layout = _layout(observed, prefix, certain)
                    groups.setdefault((ranks, distinct), []).append((layout, digest))
                    is_wanted = wanted and (layout.kind, layout.name) == (wanted.kind, wanted.name)
                    if is_wanted and not is_digest:
                        copied = copy_of(value)
        if self._thread is None and groups:
            arguments = self._open, _store_name(groups)
            self._thread = threading.Thread(
                target=self._run, args=arguments, name="tensortap-replicas", daemon=True
            )
            self._thread.start()
        try:
            self._queue.put_nowait((step, groups, copied))
        except queue.Full:
            pipeline.fault("replicas", TensortapError("earlier ones are still on the way"))

    def poll(self) -> Iterator[Alert]:
        """Yield the alerts that were raised since the last call."""
        with contextlib.suppress(IndexError):
            while True:
                yield self._alerts.popleft()

    def close(self) -> None:
        """Wait a little for what other ranks have not sent, and stop."""
        self._open = None
        thread, self._thread = self._thread, None
        if thread is not None:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=_LAST_PATIENCE)
            thread.join(2 * _LAST_PATIENCE)

    def _run(self, open_exchange: OpenExchange, name: str) -> None:
        try:
            exchange = self._exchange = open_exchange(name)
            sent = self._queue.get()
            while sent is not None:
                exchange.send(*sent)
                sent = self._next(exchange)
            exchange.patience = _LAST_PATIENCE
            while exchange.receive():
                time.sleep(_POLLS[0])
        except Exception as error:  # such as a store whose process has ended
            self._open = None
            with contextlib.suppress(Exception):  # in strict mode; nobody could catch it here
                pipeline.fault("replicas", error, "are no longer compared")

    def _next(self, exchange: ReplicaExchange | BallotRecords) -> _Sent | None:
        """Return what is to be sent next, and receive meanwhile."""
        pause = _POLLS[0]
        while exchange.receive():
            try:
                return self._queue.get(timeout=pause)
            except queue.Empty:
                pause = min(2 * pause, _POLLS[1])
        return self._queue.get()


class ReplicaExchange:
    """Sends the digests of this rank; receives and compares those of groups that it is first in."""

    def __init__(self, store: RankStore, report: Callable[[Alert], object]) -> None:
        self.patience = _PATIENCE
        self._store = store
        self._report = report
        self._votes: dict[GroupKey, ReplicaVote | BatchVote] = {}
        self._waiting: collections.deque[_AwaitedStep] = collections.deque()
        self._layouts: dict[str, tuple[ReplicaLayout, ...]] = {}
        self._sent: set[str] = set()  # hashes of layouts
        self._steps: collections.deque[int] = collections.deque()
        self._last_steps: dict[int, int] = {}  # by rank
        self._silent: set[int] = set()
        self._answers, self._questions = ReplicaAnswers(store), ReplicaQuestions(store)

    @property
    def wanted(self) -> WantedTensor | None:
        """The tensor of which another rank wants the values."""
        return self._answers.wanted

    def send(self, step: int, groups: _Groups, copied: TensorData | None = None) -> None:
        """Store what this rank has, and expect the same of the ranks in its groups."""
        layouts: dict[str, bytes] = {}
        found = [_group(key, each, layouts) for key, each in groups.items()]
        message = ReplicaMessage(step, tuple(found))
        store, rank = self._store, self._store.rank
        for name in layouts.keys() - self._sent:
            self._sent.add(name)
            store.put(f"layout/{name}", layouts[name])
        store.put(f"{message.step}/{rank}", _encode(message))
        self._steps.append(message.step)
        if len(self._steps) > _STORED:
            store.delete(f"{self._steps.popleft()}/{rank}")
        if copied is not None:
            self._answers.send(step, copied)
        self._answers.look()
        self._questions.reach(step)
        first_in = [each.key for each in message.groups if min(each.ranks) == rank]
        if first_in:
            awaited = {each for ranks, _ in first_in for each in ranks}
            now = time.monotonic()
            self._waiting.append(_AwaitedStep(message.step, now, first_in, awaited, {}))

    def receive(self) -> bool:
        """Compare the steps for which all ranks have sent theirs; return whether any is left."""
        while self._waiting:
            oldest = self._waiting[0]
            waited = time.monotonic() - oldest.since
            if not self._receive(oldest, waited) and waited < self.patience:
                break
            self._waiting.popleft()
            self._report_silent(oldest)
            self._compare(oldest)
        if (alert := self._questions.receive()) is not None:
            self._report(alert)
        is_asking = self._questions.is_waiting and self.patience == _PATIENCE
        return bool(self._waiting) or is_asking

    def _receive(self, step: _AwaitedStep, waited: float) -> bool:
        """Read the messages of the ranks; one by one if some of them are late."""
        awaited = sorted(step.awaited)
        for ranks in (awaited, *([rank] for rank in awaited if waited > 1.0)):
            found = self._store.get([f"{step.step}/{rank}" for rank in ranks])
            if found is not None:
                step.awaited.difference_update(ranks)
                step.messages.update(zip(ranks, map(_decode_message, found), strict=True))
                if ranks == awaited:
                    break
        return not step.awaited

    def _compare(self, step: _AwaitedStep) -> None:
        for rank in step.messages:
            self._last_steps[rank] = step.step
        for key in step.groups:
            digests = {
                rank: group
                for rank, message in step.messages.items()
                for group in message.groups
                if group.key == key
            }
            for group in digests.values():
                self._read_layout(group.layout)
            vote = self._votes.setdefault(key, vote_of(key))
            for alert in vote.compare(step.step, digests, self._layouts):
                self._report(alert)
            for unequal in vote.unequal[:1]:
                self._questions.ask(unequal)

    def _read_layout(self, name: str) -> None:
        if name not in self._layouts:
            found = self._store.get([f"layout/{name}"])
            if found is None:
                raise TensortapError(f"a rank has sent digests without their layout {name}")
            self._layouts[name] = _decode_layouts(found[0])

    def _report_silent(self, step: _AwaitedStep) -> None:
        """Log which ranks have stopped sending; training may hang, so nobody would see an alert."""
        self._silent &= step.awaited
        for rank in sorted(step.awaited - self._silent):
            if rank in self._last_steps and self.patience == _PATIENCE:
                self._silent.add(rank)
                last = self._last_steps[rank]
                message = (
                    f"rank {rank} is silent: its last replicas are of step {last:,}, and those of "
                    f"step {step.step:,} are missing after {self.patience:g} s"
                )
                log.warning("tensortap: %s", message)
                self._report(
                    Alert("silent", f"rank {rank}", Kind.METRIC, step.step, rank, "", message)
                )


class BallotRecords:
    """Sends the digests of this rank as records; whoever has those of all ranks compares them."""

    patience = 0.0  # nothing is received
    wanted: WantedTensor | None = None

    def __init__(self, name: str, record: Callable[[Record], object]) -> None:
        self._name = name
        self._record = record
        self._count = 0

    def send(self, step: int, groups: _Groups, _: TensorData | None = None) -> None:
        """Record what this rank has."""
        layouts: dict[str, bytes] = {}
        found = tuple(_group(key, each, layouts) for key, each in groups.items())
        # layouts take more than digests, and a session may begin later than the job
        again = self._count % _LAYOUTS_EVERY == 0
        given = {name: _decode_layouts(data) for name, data in layouts.items()} if again else {}
        self._count += 1
        value = value_of_ballot(Ballot(self._name, ReplicaMessage(step, found), given))
        rank, world_size = job.rank_and_world_size()
        seq, now = pipeline.next_seq(), time.time_ns()
        self._record(
            Record(BALLOT, Kind.VALUE, step, 0, seq, rank, world_size, now, "builtins.bytes",
                   value=value)
        )  # fmt: skip

    def receive(self) -> bool:
        """Return that nothing is awaited."""
        return False


class _AwaitedStep(NamedTuple):
    """A step for which the messages of some ranks are missing."""

    step: int
    since: float
    groups: list[GroupKey]
    awaited: set[int]
    messages: dict[int, ReplicaMessage]


def _store_name(groups: _Groups) -> str:
    """Return a name that ranks with the same tensors give as well, and no earlier tracker."""
    found = [each for (_, distinct), group in groups.items() if not distinct for each, _ in group]
    names = sorted({(each.kind, each.name) for each in found})
    if any(STAGE in each.name for each in found):
        names = []  # stages have other tensors, and are compared with each other
    key = xxhash.xxh3_64_hexdigest(repr(names).encode())
    return f"replicas/{key}/{next(_numbers[key])}"


def _group(group: GroupKey, found: _Tensors, layouts: dict[str, bytes]) -> GroupDigests:
    """Return the digests of a group, once devices have computed them."""
    encoded = _encode([layout for layout, _ in found])
    name = xxhash.xxh3_64_hexdigest(encoded)
    layouts[name] = encoded
    sums = b"".join(map(_sums, (digest for _, digest in found)))
    ranks, distinct = group
    return GroupDigests(ranks, name, sums, distinct)


def _sums(digest: bytes | PendingDigest) -> bytes:
    return sums_of(digest.resolve() if isinstance(digest, PendingDigest) else digest)


def _layout(observed: Observed, prefix: str, certain: bool) -> ReplicaLayout:
    record = Record(observed.name, observed.kind, 0, 0, 0, 0, 1, 0, tags=observed.tags)
    module = module_of(record) if observed.kind is not Kind.VALUE else observed.name
    return ReplicaLayout(
        prefix + observed.name, observed.kind, prefix + module, observed.dtype, observed.shape,
        observed.shard, certain,
    )  # fmt: skip
