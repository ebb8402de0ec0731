"""Run the steps that a black box has kept again, and find out why one went wrong."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensortap.core.files import plain
from tensortap.core.record import Record
from tensortap.rooms.blackbox.replaying import KeptBatch, KeptState, Training
from tensortap.rooms.ops.operation_records import NonFiniteOperation
from tensortap.rooms.ops.ops import OperationRecorder

DETERMINISTIC, DATA, TRANSIENT, FINITE = "deterministic", "data", "transient", "finite"


class Verdict(NamedTuple):
    """The reason why a step went wrong, in one paragraph: `text`.

    `kind` is ``deterministic`` (it happens again), ``data`` (it goes away with another batch),
    ``transient`` (it does not happen again) or ``finite`` (nothing is wrong). `rows` are those of
    the batch that cause it, `replayed` how many steps were run again, and `same` whether they
    computed the same bits as the first time.
    """

    kind: str
    step: int
    rank: int
    finding: NonFiniteOperation | None
    rows: tuple[int, ...]
    replayed: int
    same: bool
    other: int | None
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(slots=True)
class KeptStep:
    """A step since the last snapshot: its arguments, its random states, and what it returned."""

    number: int
    batch: KeptBatch
    moment: Any
    digest: bytes = b""
    bad: bool = False
    raised: str = ""  # the class of the exception


class Trial(NamedTuple):
    """One execution of a step from the state before it."""

    bad: bool
    finding: NonFiniteOperation | None = None
    raised: str = ""


class Explainer:
    """Explains the first bad one of some steps; leaves the state of the training changed."""

    def __init__(
        self,
        step: Callable[..., Any],
        model: Any,
        training: Training,
        snapshot: KeptState,
        steps: Sequence[KeptStep],
        spare: KeptStep | None,
        alerted: bool = False,
    ) -> None:
        self._step = step
        self._model = model
        self._training = training
        self._snapshot = snapshot
        self._steps = steps
        self._spare = spare  # a good step before the snapshot
        self._alerted = alerted  # an alert has seen a bad value in the last step
        self._inner = False  # whether it is one that results do not show

    def explain(self) -> tuple[Verdict, list[Record]]:
        """Run the steps again; return the verdict, and the operations of the bad step."""
        training = self._training
        bad, differs = self._replay(len(self._steps), stop=True)
        if bad is None:
            wrong = [each.number for each in self._steps if each.bad or each.raised]
            last = wrong[0] if wrong else self._steps[-1].number
            kind = TRANSIENT if wrong or differs is not None else FINITE
            self._inner = self._alerted and kind == FINITE
            if not self._inner:
                return self._verdict(kind, last, None, (), len(self._steps), differs, None), []
            bad = len(self._steps) - 1
        step = self._steps[bad]
        self._replay(bad, stop=False)
        base = training.keep_state()
        records: list[Record] = []
        trial = self._try(base, step, training.batch_of(step.batch), records)
        replayed = bad + 1
        if not trial.bad:
            kind = FINITE if self._inner else TRANSIENT
            return self._verdict(kind, step.number, None, (), replayed, differs, None), []
        finding, rank = trial.finding, self._first_rank(trial.finding)
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
            kind, step.number, finding, rows, replayed, differs, tried, rank, trial.raised
        ), records  # fmt: skip

    def _replay(self, count: int, stop: bool) -> tuple[int | None, int | None]:
        """Run the first steps again; return which is bad, and the number of one that differs."""
        training = self._training
        training.restore(self._snapshot)
        differs: int | None = None
        for index, step in enumerate(self._steps[:count]):
            training.restore_moment(step.moment)
            args, kwargs = training.batch_of(step.batch)
            result, raised = _called(self._step, *args, **kwargs)
            other = raised.partition(":")[0] != step.raised
            (changed,) = training.agree(other or training.digest_of(result) != step.digest)
            if changed and differs is None:
                differs = step.number
            bad = bool(raised) or training.is_bad(result, whole=True)
            if stop and training.agree(bad)[0]:
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
        if records is None and not self._inner:
            result, raised = _called(self._step, *args, **kwargs)
            bad = bool(raised) or training.is_bad(result, whole=True)
            return Trial(training.agree(bad)[0])
        send = _ignore if records is None else records.append
        recorder = OperationRecorder(self._model, send, lambda: step.number, always=True)
        recorder.attach()
        try:
            call = self._step
            if training.intercepts:
                call = functools.partial(recorder.intercept, self._step)
            result, raised = _called(call, *args, **kwargs)
        finally:
            recorder.close()
        found = recorder.found
        bad = bool(raised or (self._inner and found.origins))
        bad = bad or training.is_bad(result, whole=True)
        finding = found.first_nonfinite
        if self._inner and finding is None and found.origins:
            finding = found.origins[0].finding  # of values that a later operation replaces
        return Trial(training.agree(bad)[0], finding, raised)

    def _other(self, bad: int) -> KeptStep | None:
        good = [each for each in self._steps[:bad] if not each.bad]
        return good[-1] if good else self._spare

    def _first_rank(self, own: NonFiniteOperation | None) -> int:
        """Return the rank where it began, given what was found on this one."""
        # all ranks run the same program: what others send arrives later in it
        order = sys.maxsize if own is None else own.order
        found = self._training.gather(str(order))
        rank = min(range(len(found)), key=lambda each: int(found[each]))
        return rank if len(found) > 1 else self._training.rank

    def _rows(self, base: KeptState, step: KeptStep, other: KeptStep, rank: int) -> tuple[int, ...]:
        """Return the rows of the batch of a rank that make the step bad, each by itself."""
        training, own = self._training, self._training.rank == rank
        count = training.rows_of(step.batch) if own else 0
        count = int(max(map(int, training.gather(str(count)))))
        found: list[int] = []
        waiting, left = [range(count)], 64  # executions at most
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
            if training.agree(failed)[0]:
                return ()
            if self._try(base, step, batch).bad:
                if len(rows) == 1:
                    found.append(rows[0])
                else:
                    half = len(rows) // 2
                    waiting += [rows[:half], rows[half:]]
        return tuple(sorted(found))

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
        raised: str = "",
    ) -> Verdict:
        training = self._training
        rank = training.rank if rank is None else rank
        place = _place(finding, raised)
        if training.world_size > 1:
            place = training.gather(place)[rank]
        named = f" on rank {rank}" if training.world_size > 1 else ""
        text = _paragraph(kind, step, named, place, rows, replayed, differs, other)
        return Verdict(kind, step, rank, finding, rows, replayed, differs is None, other, text)


def _ignore(record: Record) -> None:
    """Take a record that nobody needs."""


def _called(step: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, str]:
    """Return the result of a step, and the exception that it raised in words."""
    try:
        return step(*args, **kwargs), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {plain(str(error), 200)}".rstrip(": ")


def _place(finding: NonFiniteOperation | None, raised: str) -> str:
    if raised:
        made = "" if finding is None else f"{_place(finding, '')}. Then "
        return f"{made}{'it' if made else 'It'} raises {raised}"
    if finding is None:
        return "No operation was seen to make it"
    of = finding.parameter or finding.module
    owner = f" of {of}" if of else ""
    line = f" at {finding.line}" if finding.line.file else ""
    code = f" ({finding.code})" if finding.code else ""
    return f"{finding.operation}{owner} in the {finding.phase}{line}{code}: {finding.why}"


def _paragraph(
    kind: str,
    step: int,
    rank: str,
    place: str,
    rows: tuple[int, ...],
    replayed: int,
    differs: int | None,
    other: int | None,
) -> str:
    """Return the verdict in words; `place` says which operation it was and why."""
    where = f"step {step}{rank}"
    steps = "1 step" if replayed == 1 else f"{replayed} steps"
    if kind == FINITE:
        return f"{where}: everything is finite. The replay of {steps} computed the same bits."
    if kind == TRANSIENT:
        if differs is not None and differs != step:
            cause = f"step {differs} computed other bits the first time"
        else:
            cause = "the same step with the same state, batch and random numbers is finite"
        return (
            f"{where}: transient. It does not happen again: in the replay of {steps}, {cause}. "
            "Suspect the hardware, a race, or state that the step keeps outside of model and "
            "optimizer."
        )
    same = "with the same bits" if differs is None else "though not with the same bits"
    again = f"It happens again in the replay of {steps}, {same}."
    if kind == DATA:
        named = ", ".join(map(str, rows[:8])) + (" …" if len(rows) > 8 else "")
        word = "row" if len(rows) == 1 else "rows"
        which = f"{word} {named} of the batch" if rows else "the batch"
        gone = f"It goes away with the batch of step {other}: check {which}."
        return f"{where}: data. {place}. {again} {gone}"
    tried = "No other batch was there to try."
    if other is not None:
        as_well = f"It happens with the batch of step {other} as well"
        tried = f"{as_well}: check the code and the state, not the data."
    return f"{where}: deterministic. {place}. {again} {tried}"
