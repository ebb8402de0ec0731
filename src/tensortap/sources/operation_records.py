"""Records of operations, and the operation in which values first stopped being finite."""

from __future__ import annotations

import collections
import contextlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensortap import ranks
from tensortap.alerts.alert import WHY, Alert
from tensortap.alerts.explanation import OperationExplanation
from tensortap.alerts.reasons.why import why
from tensortap.frameworks.operations import (
    Operation,
    OperationInput,
    OperationOutput,
    SourceLine,
)
from tensortap.pipeline.pipeline import pipeline
from tensortap.record import Kind, Record, Summary
from tensortap.sources.explanations import RecordedOperation, explanation_of
from tensortap.stats import summarize_array

_ORIGINS = 64  # of values that are not finite, per step: more are not explained
_RECENT = 4096  # records of operations in which a chain is looked for


class InputFacts(NamedTuple):
    """An input of an operation: name, dtype, shape, digest, and statistics if they are known."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: bytes | None
    stats: Summary | None

    def __str__(self) -> str:
        text = f"{self.name}: {self.dtype} {list(self.shape)}"
        return text if self.stats is None else f"{text}, {_range(self.stats)}"


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


@dataclass(slots=True)
class Origin:
    """An operation that made values that are not finite; `absorbed` once all that used them is."""

    finding: NonFiniteOperation
    absorbed: bool = False


class OperationRecords:
    """Turns operations into records, which go to `send`, and follows values that are not finite."""

    def __init__(self, send: Callable[[Record], object], prefix: Callable[[], str]) -> None:
        self._send = send
        self._prefix = prefix
        self.origins: list[Origin] = []
        self._tainted: dict[int, Origin] = {}  # by memory
        self._recent: collections.deque[RecordedOperation] = collections.deque(maxlen=_RECENT)
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
        now, place, prefix = time.time_ns(), operation.place, self._prefix()
        tags = _tags(operation, prefix)
        for each in operation.outputs:
            own = tags
            if each.parameter:
                own = {**own, "parameter": prefix + each.parameter}
            if origin is not None and _is_bad(each.stats):
                finding = origin.finding
                own = {**own, "origin": prefix + finding.module, "why": finding.why,
                       "made": prefix + finding.name}  # fmt: skip
            record = Record(
                f"{prefix}{place}{each.path}", Kind.OP, step, operation.call, pipeline.next_seq(),
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
        elif any(each.dtype.startswith(("float", "bfloat")) for each in operation.outputs):
            for before in known:
                before.absorbed = True
        return origin

    def _new_origin(
        self, operation: Operation, bad: list[OperationOutput], step: int, rank: int
    ) -> Origin | None:
        if operation.is_view or len(self.origins) >= _ORIGINS or _is_deliberate(operation, bad):
            return None  # a view may also show memory that nothing has been written to yet
        line, stats = operation.line, bad[0].stats
        assert stats is not None
        name, explanation = operation.place + bad[0].path, None
        reason = f"{operation.name} made {_counts(stats)}"
        try:
            reason = why(operation)
            explanation = explanation_of(operation, self._prefix() + name, reason, self._recent)
        except Exception as error:  # words must not cost the finding
            pipeline.fault(operation.place, error, "was not explained")
        origin = Origin(NonFiniteOperation(
            name, operation.name, operation.phase, operation.module, step, operation.call, rank,
            line, "" if explanation is None else explanation.code,
            tuple(map(_facts, operation.inputs[:8])), f"{_counts(stats)} of {stats.count:,}",
            reason, bad[0].parameter, self.count, explanation,
        ))  # fmt: skip
        self.origins.append(origin)
        return origin


def _is_bad(stats: Summary | None) -> bool:
    return stats is not None and stats.finite != stats.count


def _has_bad(given: OperationInput) -> bool:
    """Return whether an input is not finite; memory may have been written by others since."""
    stats = _facts(given).stats
    return stats is None or _is_bad(stats)


def _is_deliberate(operation: Operation, bad: Iterable[OperationOutput]) -> bool:
    """Return whether infinite values are constants of the program, as in masks."""
    stats = [each.stats for each in bad if each.stats is not None]
    if any(each.nans for each in stats):
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


def _range(stats: Summary) -> str:
    if not stats.finite:
        return _counts(stats)
    text = f"{stats.min:.4g} to {stats.max:.4g}"
    return text if stats.finite == stats.count else f"{text}, {_counts(stats)}"


def _tags(operation: Operation, prefix: str) -> dict[str, str]:
    tags = {
        "module": prefix + operation.module, "op": operation.name, "phase": operation.phase,
        "index": str(operation.position),
    }  # fmt: skip
    if operation.line.file:
        tags["line"], tags["function"] = str(operation.line), operation.line.function
    if operation.node:
        tags["node"] = operation.node
    if operation.inputs:
        tags["inputs"] = " ".join([x.digest.hex() if x.digest else "-" for x in operation.inputs])
    return tags
