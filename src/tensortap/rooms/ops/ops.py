"""`ops`: record every operation of a program, with its line, and find the first bad one."""

from __future__ import annotations

import bisect
import collections
import contextlib
import functools
import heapq
import linecache
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensortap.alerts.alert import WHY, Alert, record_of
from tensortap.capture.pipeline import pipeline
from tensortap.core import ranks
from tensortap.core.record import Kind, Record, Summary
from tensortap.rooms.ops.explanation import ChainLink, Operand, OperationExplanation
from tensortap.rooms.ops.operations import (
    OPTIMIZER,
    Operation,
    OperationInput,
    OperationOutput,
    SourceLine,
)
from tensortap.rooms.ops.reasons import first_bad, selected, why
from tensortap.rooms.track.tracked_records import TrackedRecords
from tensortap.stats import summarize_array
from tensortap.text.tensors import line as statistics_line
from tensortap.values.registry import parts

_AROUND = 3  # lines before and after


class InputFacts(NamedTuple):
    """An input of an operation: name, dtype, shape, digest, and statistics if they are known."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: bytes | None
    stats: Summary | None

    def __str__(self) -> str:
        return f"{self.name}: {_values(self.stats, self.dtype, self.shape)}"


class NonFiniteOperation(NamedTuple):
    """The operation that made values that are not finite, where, of what, and `why`.

    `name` is the name of its record, `code` the text of the line in the user's program.
    """

    name: str
    operation: str
    phase: str
    module: str
    step: int
    call: int
    rank: int
    line: SourceLine
    code: str
    inputs: tuple[InputFacts, ...]
    output: str
    why: str
    parameter: str = ""
    order: int = 0  # number of operations before it
    explanation: OperationExplanation | None = None

    def alert(self, message: str = "") -> Alert:
        """Return the alert that shows people why."""
        place = f" at {self.line}" if self.line.file else ""
        return Alert(
            WHY, self.name, Kind.OP, self.step, self.rank, self.module,
            message or f"step {self.step}: {self.operation}{place}: {self.why}", call=self.call,
            explanation=self.explanation,
        )  # fmt: skip

    def __str__(self) -> str:
        of = f" of {self.parameter or self.module}" if self.parameter or self.module else ""
        place = f" at {self.line}" if self.line.file else ""
        code = f"\n  {self.code}" if self.code else ""
        inputs = "".join(f"\n  {each}" for each in self.inputs)
        head = f"step {self.step}, {self.phase}: {self.operation}{of}{place}"
        return f"{head}: {self.why}{code}{inputs}\n  output: {self.output}"


class RecordedOperation(NamedTuple):
    """The record of an operation's output, and where the operation is in the program."""

    record: Record
    line: SourceLine
    is_view: bool


@dataclass(slots=True)
class Origin:
    """An operation that made values that are not finite; `absorbed` once all that used them is."""

    finding: NonFiniteOperation
    absorbed: bool = False


class OperationRecords:
    """Turns operations into records, which go to `send`, and follows values that are not finite."""

    def __init__(self, send: Callable[[Record], object]) -> None:
        self._send = send
        self.origins: list[Origin] = []
        self._tainted: dict[int, Origin] = {}  # by memory
        # where a chain is looked for
        self._recent: collections.deque[RecordedOperation] = collections.deque(maxlen=4096)
        self.count = 0

    @property
    def first_nonfinite(self) -> NonFiniteOperation | None:
        """The first operation whose values were not finite and did not vanish again."""
        return next((each.finding for each in self.origins if not each.absorbed), None)

    def end_step(self) -> None:
        """Forget where memory came from; the next step writes it again."""
        self._tainted.clear()
        self._recent.clear()

    def add(self, operation: Operation, step: int) -> None:
        """Make a record for each output of an operation."""
        rank, world_size = ranks.rank_and_world_size()
        origin = None
        if self._tainted or any(_is_bad(each.stats) for each in operation.outputs):
            origin = self._follow(operation, step, rank)
        now, place = time.time_ns(), operation.place
        tags = _tags(operation)
        for each in operation.outputs:
            own = tags
            if each.parameter:
                own = {**own, "parameter": each.parameter}
            if origin is not None and _is_bad(each.stats):
                finding = origin.finding
                own = {**own, "origin": finding.module, "why": finding.why,
                       "made": finding.name}  # fmt: skip
            record = Record(
                f"{place}{each.path}", Kind.OP, step, operation.call, pipeline.next_seq(),
                rank, world_size, now, operation.type, each.dtype, each.shape, each.shard,
                each.digest, None, each.stats, own,
            )  # fmt: skip
            self._send(record)
            self._recent.append(RecordedOperation(record, operation.line, operation.is_view))
        self.count += 1

    # -- values that are not finite -------------------------------------------------------------

    def _follow(self, operation: Operation, step: int, rank: int) -> Origin | None:
        """Return where the bad values of an operation began; None if it has none, or a mask."""
        bad = [each for each in operation.outputs if _is_bad(each.stats)]
        known = [self._tainted[x.memory] for x in operation.inputs if x.memory in self._tainted]
        if known:
            held = {x.memory: x for x in operation.inputs if x.memory in self._tainted}
            known = [self._tainted[m] for m, x in held.items() if _has_bad(x)]
        origin = None
        if bad:
            origin = known[0] if known else self._new_origin(operation, bad, step, rank)
        for each in operation.outputs:
            self._tainted.pop(each.memory, None)
        if origin is not None:
            origin.absorbed = False
            self._tainted.update((each.memory, origin) for each in bad)
        elif _uses_values(operation):
            for before in known:
                before.absorbed = True
        return origin

    def _new_origin(
        self, operation: Operation, bad: list[OperationOutput], step: int, rank: int
    ) -> Origin | None:
        # a view may also show memory that nothing has been written to yet; and more than 64 per
        # step are not explained
        if operation.is_view or len(self.origins) >= 64 or _is_deliberate(operation, bad):
            return None
        line, stats = operation.line, bad[0].stats
        assert stats is not None
        name, explanation = operation.place + bad[0].path, None
        reason = f"{operation.name} made {_counts(stats)}"
        inputs = selected(operation, first_bad(operation))[0][:8]  # the first are enough to see why
        facts = tuple(map(_facts, inputs))
        try:
            reason = why(operation)
            explanation = _explanation(operation, name, reason, facts, bad[0], self._recent)
        except Exception as error:  # words must not cost the finding
            pipeline.fault(operation.place, error, "was not explained")
        origin = Origin(NonFiniteOperation(
            name, operation.name, operation.phase, operation.module, step, operation.call, rank,
            line, "" if explanation is None else explanation.code,
            facts, f"{_counts(stats)} of {stats.count:,}", reason, bad[0].parameter, self.count,
            explanation,
        ))  # fmt: skip
        self.origins.append(origin)
        return origin


def _is_bad(stats: Summary | None) -> bool:
    return stats is not None and stats.finite != stats.count


def _uses_values(operation: Operation) -> bool:
    """Return whether an operation computes floats of its input, not only of its shape."""
    is_float = any(each.dtype.startswith(("float", "bfloat")) for each in operation.outputs)
    # backward() begins with ones_like(loss)
    return is_float and not operation.name.endswith("_like")


def _has_bad(given: OperationInput) -> bool:
    """Return whether an input is not finite; memory may have been written by others since."""
    stats = _facts(given).stats
    return stats is None or _is_bad(stats)


def _is_deliberate(operation: Operation, bad: Iterable[OperationOutput]) -> bool:
    """Return whether infinite values are constants of the program, as in masks."""
    stats = [each.stats for each in bad if each.stats is not None]
    if any(each.nans for each in stats):
        return False
    if operation.phase == OPTIMIZER:
        return False
    if any(_is_infinite(value) for value in operation.scalars.values()):
        return True
    inputs = [_facts(each).stats for each in operation.inputs]
    masks = any(each is not None and each.neginfs for each in inputs)
    return masks and not any(each.posinfs for each in stats)


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _facts(given: OperationInput) -> InputFacts:
    array = given.array()
    stats = None
    if array is not None:
        with contextlib.suppress(TypeError):
            stats = summarize_array(array)
    return InputFacts(given.name, given.dtype, given.shape, given.digest, stats)


def _counts(stats: Summary) -> str:
    found = ((stats.nans, "NaN"), (stats.posinfs, "Inf"), (stats.neginfs, "-Inf"))
    return " and ".join(f"{count:,} {word}" for count, word in found if count) or "finite values"


def _tags(operation: Operation) -> dict[str, str]:
    tags = {
        "module": operation.module, "op": operation.name, "phase": operation.phase,
        "index": str(operation.position),
    }  # fmt: skip
    if operation.line.file:
        tags["line"], tags["function"] = str(operation.line), operation.line.function
    if operation.node:
        tags["node"] = operation.node
    if operation.inputs:
        tags["inputs"] = " ".join([x.digest.hex() if x.digest else "-" for x in operation.inputs])
    return tags


# -- explanations ---------------------------------------------------------------------------------


def _explanation(
    operation: Operation,
    name: str,
    reason: str,
    inputs: Sequence[InputFacts],
    output: OperationOutput,
    before: Sequence[RecordedOperation],
) -> OperationExplanation:
    """Return what to show of an operation; `before` are those that ran before it in the step."""
    line = operation.line
    first = max(1, line.line - _AROUND)
    read = [Operand(x.name, _values(x.stats, x.dtype, x.shape)) for x in inputs]
    made = Operand("output" + output.path, _values(output.stats, output.dtype, output.shape))
    return OperationExplanation(
        name, operation.name, operation.phase, operation.module, reason, line.file, line.line,
        line.function, first, _source_lines(line.file, first, line.line + _AROUND), (*read, made),
        _chain(operation, before),
    )  # fmt: skip


def _values(stats: Summary | None, dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}" if stats is None else statistics_line(stats, dtype, shape)


def _source_lines(file: str, first: int, last: int) -> tuple[str, ...]:
    """Return lines of the running program; what looks like a credential is hidden."""
    if not file:
        return ()
    lines = (each.rstrip().expandtabs(4) for each in linecache.getlines(file)[first - 1 : last])
    return tuple(_shown(each)[:200] for each in lines)


@functools.lru_cache(1024)
def _shown(line: str) -> str:
    from tensortap.rooms.provenance.redact import Redactor

    return Redactor().text(line)


def _chain(operation: Operation, before: Sequence[RecordedOperation]) -> tuple[ChainLink, ...]:
    """Return the last operations that led to this one, in order; views are left out."""
    makers: dict[str, list[int]] = {}
    for number, each in enumerate(before):
        if each.record.digest is not None:
            makers.setdefault(each.record.digest.hex(), []).append(number)
    inputs = [x.digest.hex() for x in operation.inputs if x.digest is not None]
    found: list[int] = []
    waiting = [-number for number in _made_by(inputs, makers, len(before))]
    heapq.heapify(waiting)  # the latest first
    seen = set(waiting)
    while waiting and len(found) < 12:  # links are enough to read
        number = -heapq.heappop(waiting)
        each = before[number]
        if not each.is_view:
            found.append(number)
        for earlier in _made_by(each.record.tags.get("inputs", "").split(), makers, number):
            if -earlier not in seen:
                seen.add(-earlier)
                heapq.heappush(waiting, -earlier)
    return tuple(_link(before[number]) for number in reversed(found))


def _made_by(digests: Sequence[str], makers: dict[str, list[int]], end: int) -> set[int]:
    """Return which operations before `end` made tensors with these digests, the last of each."""
    found = set()
    for digest in digests:
        numbers = makers.get(digest, [])
        at = bisect.bisect_left(numbers, end)
        if at:
            found.add(numbers[at - 1])
    return found


def _link(each: RecordedOperation) -> ChainLink:
    record, line = each.record, each.line
    code = "".join(_source_lines(line.file, line.line, line.line)).strip()
    output = _values(record.stats, record.dtype, record.shape)
    return ChainLink(record.name, record.tags.get("op", ""), str(line), code, output)


log = logging.getLogger("tensortap")


class OperationRecorder:
    """Takes the operations that the hooks of a framework observe, while it is attached."""

    def __init__(
        self,
        model: Any,
        send: Callable[[Record], object],
        step: Callable[[], int],
        always: bool = False,
    ) -> None:
        self._always = always  # also while capturing is off; then the caller reports the finding
        self._send = send
        self.remarks: dict[str, str] = {}  # for the user; hooks add to them
        self.found = OperationRecords(send)
        self._step = step
        self._last_step = -1
        self._attached = False
        self._reported: set[str] = set()
        found = (part.operations(model, self) for part in parts("tensortap.rooms.ops"))
        self._hooks: Any = next((hooks for hooks in found if hooks is not None), None)
        if self._hooks is None:
            raise TypeError(f"model must be a torch.nn.Module or None; got {model!r:.100}")

    @property
    def capturing(self) -> bool:
        return self._attached and (self._always or pipeline.enabled)

    @property
    def step_number(self) -> int:
        return self._step()

    def attach(self, on: bool = True) -> None:
        """Begin to record, or stop."""
        if on is self._attached:
            return
        self._attached = on
        self._hooks.attach() if on else self._hooks.detach()
        self._end_step()
        for name, remark in self.remarks.items():
            if name not in self._reported:
                self._reported.add(name)
                log.warning("tensortap: %s: %s", name, remark)

    def close(self) -> None:
        """Stop, and let go of the model."""
        self.attach(False)
        self._hooks = None

    def operation(self, operation: Operation) -> None:
        step = self._step()
        if step != self._last_step:
            self._last_step = step
            self._end_step()
        self.found.add(operation, step)

    def _end_step(self) -> None:
        self.found.end_step()
        finding = self.found.first_nonfinite
        if finding is not None and "why" not in self._reported and not self._always:
            self._reported.add("why")
            world_size = ranks.rank_and_world_size()[1]
            self._send(record_of(
                finding.alert(), seq=pipeline.next_seq(), time_ns=time.time_ns(),
                world_size=world_size,
            ))  # fmt: skip

    def fault(self, name: str, error: Exception) -> object:
        return pipeline.fault(name, error)


class Operations(OperationRecorder):
    """The operations of a program; made by `ops`, used in a ``with`` statement.

    `remarks` has notes, such as that compiled code runs eagerly meanwhile.
    """

    def __init__(self, model: Any) -> None:
        self._kept = TrackedRecords()
        super().__init__(model, lambda record: self._kept.send(record, 0), _current_step)

    def __enter__(self) -> Operations:
        self._kept.begin()
        self.attach()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self._kept.end(pipeline.clock.step or 0)

    @property
    def records(self) -> list[Record]:
        """The records so far, of kind Op, in the order of execution."""
        return [record for record in self._kept if record.kind is Kind.OP]

    @property
    def evicted(self) -> int:
        """Number of records evicted from memory; a run keeps all."""
        return self._kept.memory.evicted

    @property
    def first_nonfinite(self) -> NonFiniteOperation | None:
        """The operation that made the first NaN or infinity: its line, its inputs, and why.

        None if all values are finite. Infinities that the program writes on purpose, such as masks,
        and values that a later operation replaces do not count.
        """
        return self.found.first_nonfinite

    @property
    def nonfinite(self) -> list[NonFiniteOperation]:
        """All operations that made values that are not finite of finite ones, in order."""
        return [origin.finding for origin in self.found.origins]


def _current_step() -> int:
    return pipeline.clock.step or 0


def ops(model: Any = None) -> Operations:
    """Record every operation of a program: ``with tap.ops(model) as ops: … ops.first_nonfinite``.

    Each operation of forward, backward and optimizer becomes a record of kind ``Op``: module,
    operation, line of your program, statistics and digest of its outputs, digests of its inputs.
    They go to the run, the live session, or memory, like all records. Training computes the same
    bits, more slowly, and compiled code runs eagerly meanwhile. For torch only.

    >>> import torch
    >>> model = torch.nn.Linear(2, 2)
    >>> with ops(model) as found:
    ...     loss = torch.log(model(torch.ones(1, 2)) * 0).sum()
    >>> found.first_nonfinite.operation, found.first_nonfinite.why
    ('log', 'log of 0: 2 elements are 0')
    """
    return Operations(model)
