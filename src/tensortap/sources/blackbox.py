"""`blackbox`: keep what is needed to run recent steps again, and say why one went wrong."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensortap.alerts.alert import Alert, record_of
from tensortap.alerts.monitor import listeners
from tensortap.arguments import check_callable, check_count
from tensortap.frameworks.registry import loaded_frameworks
from tensortap.frameworks.replaying import KeptBatch, KeptState, Training
from tensortap.pipeline.pipeline import pipeline
from tensortap.record import Kind, Record
from tensortap.sources.operation_records import NonFiniteOperation
from tensortap.sources.ops import OperationRecorder
from tensortap.sources.verdicts import DATA, DETERMINISTIC, FINITE, TRANSIENT, Verdict, paragraph

log = logging.getLogger("tensortap")

_MEMORY = 2 << 30  # bytes of batches; the state is kept once on top of it
_TRIALS = 64  # executions to find the rows of a batch


@dataclass(slots=True)
class KeptStep:
    """A step since the last snapshot: its arguments, its random states, and what it returned."""

    number: int
    batch: KeptBatch
    moment: Any
    digest: bytes = b""
    bad: bool = False


class Trial(NamedTuple):
    """One execution of a step from the state before it."""

    bad: bool
    recorder: OperationRecorder | None = None


class BlackBox:
    """A step function whose recent calls can be run again; made by `blackbox`."""

    def __init__(
        self, step: Callable[..., Any], model: Any, training: Training, every: int, memory: int
    ) -> None:
        self._step = step
        self._model = model
        self._training = training
        self._every = every
        self._memory = memory
        self._snapshot: KeptState | None = None
        self._steps: list[KeptStep] = []
        self._spare: KeptStep | None = None  # a good step before the snapshot
        self._count = 0
        self._alerted = self._explained = self._replaying = False
        self.verdicts: list[Verdict] = []
        listeners.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; keep what is needed to run it again."""
        if self._replaying or not pipeline.enabled:
            return self._step(*args, **kwargs)
        self._guarded(self._before, (args, kwargs))
        result = self._step(*args, **kwargs)
        self._guarded(self._after, result)
        return result

    def _guarded(self, part: Callable[[Any], None], given: Any) -> None:
        try:
            part(given)
        except Exception as error:
            self._snapshot, self._steps = None, []
            pipeline.fault("blackbox", error, "was interrupted")

    def notify(self, alert: Alert) -> None:
        """Explain the last step when the next one begins; alerts about NaN and Inf call this."""
        if alert.rule in ("nan", "inf") and not self._replaying:
            self._alerted = True

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the box holds now: one copy of the state, and batches."""
        state = 0 if self._snapshot is None else self._snapshot.nbytes
        return state + sum(each.batch.nbytes for each in self._steps)

    @property
    def verdict(self) -> Verdict | None:
        """The last verdict."""
        return self.verdicts[-1] if self.verdicts else None

    # -- keeping --------------------------------------------------------------------------------

    def _before(self, batch: Any) -> None:
        alerted, self._alerted = self._training.agree(self._alerted), False
        if alerted and not self._explained and self._steps:
            self._explained = True
            self.explain()
        held = sum(each.batch.nbytes for each in self._steps)
        # a state that is broken already must not replace the one from before
        due = len(self._steps) >= self._every or held > self._memory
        if self._snapshot is None or (due and not self._steps[-1].bad):
            good = [each for each in self._steps if not each.bad]
            self._spare = good[-1] if good else self._spare
            self._snapshot, self._steps = self._training.keep_state(), []
        number = self._count if pipeline.clock.step is None else pipeline.clock.step
        kept = self._training.keep_batch(batch)
        self._steps.append(KeptStep(number, kept, self._training.keep_moment()))
        self._count += 1

    def _after(self, result: Any) -> None:
        last = self._steps[-1]
        last.digest = self._training.digest_of(result)
        last.bad = self._training.agree(self._training.is_bad(result, whole=False))
        if not last.bad:
            self._explained = False
        elif not self._explained:
            self._explained = True
            self.explain()

    # -- explaining -----------------------------------------------------------------------------

    def explain(self) -> Verdict | None:
        """Run the last steps again and say what went wrong; training goes on as if nothing was.

        In a distributed job all ranks have to call this. Returns None if no step was kept.
        """
        if self._snapshot is None or not self._steps:
            return None
        training, enabled = self._training, pipeline.enabled
        present = training.keep_present()
        self._replaying = True
        pipeline.switch(False)  # nobody tracks or catches what is run again
        try:
            verdict, records = self._explain(self._snapshot)
        finally:
            training.restore(present)
            pipeline.switch(enabled)
            self._replaying = False
        self._publish(verdict, records)
        return verdict

    def _explain(self, snapshot: KeptState) -> tuple[Verdict, list[Record]]:
        training = self._training
        bad, differs = self._replay(snapshot, len(self._steps), stop=True)
        if bad is None:
            wrong = [each.number for each in self._steps if each.bad]
            last = wrong[0] if wrong else self._steps[-1].number
            kind = TRANSIENT if wrong or differs is not None else FINITE
            return self._verdict(kind, last, None, (), len(self._steps), differs, None), []
        step = self._steps[bad]
        self._replay(snapshot, bad, stop=False)
        base = training.keep_state()
        records: list[Record] = []
        trial = self._try(base, step, training.batch_of(step.batch), records)
        replayed = bad + 1
        if not trial.bad:
            return self._verdict(TRANSIENT, step.number, None, (), replayed, differs, None), []
        assert trial.recorder is not None
        finding, rank = self._first(trial.recorder.found.first_nonfinite)
        other = self._other(bad)
        rows: tuple[int, ...] = ()
        kind = DETERMINISTIC
        if other is not None:
            own = training.rank == rank
            replaced = self._try(base, step, training.batch_of((other if own else step).batch))
            if not replaced.bad:
                kind = DATA
                rows = self._rows(base, step, other, rank)
        tried = None if other is None else other.number
        return self._verdict(
            kind, step.number, finding, rows, replayed, differs, tried, rank
        ), records  # fmt: skip

    def _replay(self, snapshot: KeptState, count: int, stop: bool) -> tuple[int | None, int | None]:
        """Run the first steps again; return which is bad, and the number of one that differs."""
        training = self._training
        training.restore(snapshot)
        differs: int | None = None
        for index, step in enumerate(self._steps[:count]):
            training.restore_moment(step.moment)
            args, kwargs = training.batch_of(step.batch)
            result = self._step(*args, **kwargs)
            changed = training.agree(training.digest_of(result) != step.digest)
            if changed and differs is None:
                differs = step.number
            if stop and training.agree(training.is_bad(result, whole=True)):
                return index, differs
        return None, differs

    def _try(
        self, base: KeptState, step: KeptStep, batch: Any, records: list[Record] | None = None
    ) -> Trial:
        """Run a step from the state before it, with this batch."""
        training = self._training
        training.restore(base)
        training.restore_moment(step.moment)
        args, kwargs = batch
        recorder = None
        if records is not None:
            recorder = OperationRecorder(
                self._model, records.append, lambda: step.number, always=True
            )
            recorder.attach()
        try:
            result = self._step(*args, **kwargs)
        finally:
            if recorder is not None:
                recorder.close()
        return Trial(training.agree(training.is_bad(result, whole=True)), recorder)

    def _other(self, bad: int) -> KeptStep | None:
        good = [each for each in self._steps[:bad] if not each.bad]
        return good[-1] if good else self._spare

    def _first(self, own: NonFiniteOperation | None) -> tuple[NonFiniteOperation | None, int]:
        """Return the finding of the rank where it began, if it is this one, and that rank."""
        # all ranks run the same program: what others send arrives later in it
        order = sys.maxsize if own is None else own.order
        found = self._training.gather(str(order))
        rank = min(range(len(found)), key=lambda each: int(found[each]))
        return own, rank if len(found) > 1 else self._training.rank

    def _rows(self, base: KeptState, step: KeptStep, other: KeptStep, rank: int) -> tuple[int, ...]:
        """Return the rows of the batch of a rank that make the step bad, each by itself."""
        training, own = self._training, self._training.rank == rank
        count = training.rows_of(step.batch) if own else 0
        count = int(max(map(int, training.gather(str(count)))))
        found: list[int] = []
        waiting, left = [range(count)], _TRIALS
        while waiting and count and left:
            rows = waiting.pop(0)
            left -= 1
            try:
                chosen = frozenset(rows)
                batch = (
                    training.mixed(step.batch, other.batch, chosen)
                    if own
                    else training.batch_of(step.batch)
                )
                failed = False
            except (ValueError, IndexError):
                batch, failed = training.batch_of(step.batch), True
            if training.agree(failed):
                return ()
            if self._try(base, step, batch).bad:
                if len(rows) == 1:
                    found.append(rows[0])
                else:
                    half = len(rows) // 2
                    waiting += [rows[:half], rows[half:]]
        return tuple(sorted(found))

    # -- the verdict -------------------------------------------------------------------------------

    def _verdict(
        self,
        kind: str,
        step: int,
        finding: NonFiniteOperation | None,
        rows: tuple[int, ...],
        replayed: int,
        differs: int | None,
        other: int | None,
        rank: int | None = None,
    ) -> Verdict:
        training = self._training
        rank = training.rank if rank is None else rank
        place = _place(finding)
        if training.world_size > 1:
            place = training.gather(place)[rank]
        named = f" on rank {rank}" if training.world_size > 1 else ""
        text = paragraph(kind, step, named, place, rows, replayed, differs, other)
        return Verdict(kind, step, rank, finding, rows, replayed, differs is None, other, text)

    def _publish(self, verdict: Verdict, records: list[Record]) -> None:
        """Print the verdict, and put it and the operations of the step into the run."""
        self.verdicts.append(verdict)
        if self._training.rank == verdict.rank:
            log.warning("tensortap: %s", verdict.text)
        for record in records:
            pipeline.put(record)
        finding = verdict.finding
        name = "blackbox" if finding is None else finding.name
        module = "" if finding is None else finding.module
        alert = Alert("why", name, Kind.OP, verdict.step, self._training.rank, module, verdict.text)
        world_size = self._training.world_size
        pipeline.put(record_of(
            alert, seq=pipeline.next_seq(), time_ns=time.time_ns(), world_size=world_size
        ))  # fmt: skip


def _place(finding: NonFiniteOperation | None) -> str:
    if finding is None:
        return "No operation was seen to make it"
    of = finding.parameter or finding.module
    owner = f" of {of}" if of else ""
    line = f" at {finding.line}" if finding.line.file else ""
    code = f" ({finding.code})" if finding.code else ""
    return f"{finding.operation}{owner} in the {finding.phase}{line}{code}: {finding.why}"


def blackbox(
    train_step: Callable[..., Any],
    model: Any,
    optimizer: Any = None,
    *others: Any,
    every: int = 50,
    memory: int = _MEMORY,
) -> BlackBox:
    """Return the step function with a black box: ``step = tap.blackbox(train_step, model, opt)``.

    The box keeps a copy of the state every `every` steps, and for each step since then its
    arguments and the random states, in host memory: once the bytes of parameters, buffers,
    gradients and optimizer state, and at most `memory` bytes of batches. `others` are a scheduler,
    a GradScaler, generators, and whatever else a step changes. If a result is not finite, or an
    alert about NaN fires, or you call ``step.explain()``, it runs the steps again and says whether
    the fault is deterministic, in the data or transient, in which operation, and why. Then it puts
    everything back, bit by bit.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> def train_step(x):
    ...     return model(x).mean()
    >>> step = blackbox(train_step, model)
    >>> loss = step(torch.ones(4, 2))
    >>> step.explain().kind
    'finite'
    """
    check_callable("train_step", train_step)
    check_count("every", every)
    check_count("memory", memory)
    for framework in loaded_frameworks():
        training = framework.training(model, optimizer, others)
        if training is not None:
            return BlackBox(train_step, model, training, every, memory)
    raise TypeError(f"model must be a torch.nn.Module, got {model!r:.100}")
