"""Run the steps that a black box has kept again, and find out why one went wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tensortap.core.files import plain
from tensortap.core.record import Record
from tensortap.rooms.ops.ops import NonFiniteOperation, OperationRecorder

if TYPE_CHECKING:
    from tensortap.rooms.blackbox.torch import Kept, TorchTraining

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
    replayed: int
    same: bool = True
    finding: NonFiniteOperation | None = None
    rows: tuple[int, ...] = ()
    other: int | None = None  # the step whose batch was tried in its place
    text: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass(slots=True)
class KeptStep:
    """A step since the last snapshot: its arguments, its random states, and what it returned."""

    number: int
    batch: Kept
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
        training: TorchTraining,
        snapshot: Kept,
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
                found = Verdict(kind, last, training.rank, len(self._steps))
                return self._in_words(found, differs), []
            bad = len(self._steps) - 1
        step = self._steps[bad]
        self._replay(bad, stop=False)
        base = training.keep_state()
        records: list[Record] = []
        trial = self._try(base, step, training.batch_of(step.batch), records)
        if not trial.bad:
            kind = FINITE if self._inner else TRANSIENT
            found = Verdict(kind, step.number, training.rank, bad + 1)
            return self._in_words(found, differs), []
        rank = self._first_rank(trial.finding)
        found = Verdict(DETERMINISTIC, step.number, rank, bad + 1, finding=trial.finding)
        other = self._other(bad)
        if other is not None:
            found = found._replace(other=other.number)
            own = training.rank == rank
            replaced = self._try(base, step, training.batch_of((other if own else step).batch))
            if not replaced.bad:
                found = found._replace(kind=DATA, rows=self._rows(base, step, other, rank))
        return self._in_words(found, differs, trial.raised), records

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
        self, base: Kept, step: KeptStep, batch: Any, records: list[Record] | None = None
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
            result, raised = _called(self._step, *args, **kwargs)
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

    def _rows(self, base: Kept, step: KeptStep, other: KeptStep, rank: int) -> tuple[int, ...]:
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

    def _in_words(self, found: Verdict, differs: int | None, raised: str = "") -> Verdict:
        """Return a verdict with its text; `differs` is the first step with other bits."""
        place, where = _place(found.finding, raised), f"step {found.step}"
        if self._training.world_size > 1:
            place = self._training.gather(place)[found.rank]
            where += f" on rank {found.rank}"
        text = f"{where}: {_paragraph(found, place, differs)}"
        return found._replace(same=differs is None, text=text)


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


def _paragraph(found: Verdict, place: str, differs: int | None) -> str:
    """Return the verdict in words; `place` says which operation it was and why."""
    steps = "1 step" if found.replayed == 1 else f"{found.replayed} steps"
    if found.kind == FINITE:
        return f"everything is finite. The replay of {steps} computed the same bits."
    if found.kind == TRANSIENT:
        cause = "the same step with the same state, batch and random numbers is finite"
        if differs is not None and differs != found.step:
            cause = f"step {differs} computed other bits the first time"
        return (
            f"transient. It does not happen again: in the replay of {steps}, {cause}. Suspect the "
            "hardware, a race, or state that the step keeps outside of model and optimizer."
        )
    same = "with the same bits" if differs is None else "though not with the same bits"
    again = f"It happens again in the replay of {steps}, {same}."
    if found.kind == DATA:
        named = ", ".join(map(str, found.rows[:8])) + (" …" if len(found.rows) > 8 else "")
        word = "row" if len(found.rows) == 1 else "rows"
        which = f"{word} {named} of the batch" if found.rows else "the batch"
        gone = f"It goes away with the batch of step {found.other}: check {which}."
        return f"data. {place}. {again} {gone}"
    tried = "No other batch was there to try."
    if found.other is not None:
        as_well = f"It happens with the batch of step {found.other} as well"
        tried = f"{as_well}: check the code and the state, not the data."
    return f"deterministic. {place}. {again} {tried}"
