"""Explanations of operations that made values that are not finite: lines, operands, chain."""

from __future__ import annotations

import bisect
import functools
import heapq
import linecache
from collections.abc import Sequence
from typing import NamedTuple

from tensortap.alerts.explanation import ChainLink, OperationExplanation
from tensortap.alerts.reasons.evidence import evidence_of
from tensortap.frameworks.operations import Operation, SourceLine
from tensortap.record import Record
from tensortap.text.tensors import line as statistics_line

_AROUND = 3  # lines before and after
_LONGEST = 200  # characters of a line
_LINKS = 12  # operations of a chain


class RecordedOperation(NamedTuple):
    """The record of an operation's output, and where the operation is in the program."""

    record: Record
    line: SourceLine
    is_view: bool


def explanation_of(
    operation: Operation, name: str, reason: str, before: Sequence[RecordedOperation]
) -> OperationExplanation:
    """Return what to show of an operation; `before` are those that ran before it in the step."""
    line = operation.line
    first = max(1, line.line - _AROUND)
    operands, bad, elements = evidence_of(operation)
    return OperationExplanation(
        name, operation.name, operation.phase, operation.module, reason, line.file, line.line,
        line.function, first, source_lines(line.file, first, line.line + _AROUND), operands, bad,
        elements, _chain(operation, before),
    )  # fmt: skip


def source_lines(file: str, first: int, last: int) -> tuple[str, ...]:
    """Return lines of the running program; what looks like a credential is hidden."""
    if not file:
        return ()
    lines = (each.rstrip().expandtabs(4) for each in linecache.getlines(file)[first - 1 : last])
    return tuple(_shown(each)[:_LONGEST] for each in lines)


@functools.lru_cache(1024)
def _shown(line: str) -> str:
    from tensortap.provenance.redact import Redactor

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
    while waiting and len(found) < _LINKS:
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
    output = f"{record.dtype} {list(record.shape)}"
    if record.stats is not None:
        output = statistics_line(record.stats, record.dtype, record.shape)
    code = "".join(source_lines(line.file, line.line, line.line)).strip()
    return ChainLink(record.name, record.tags.get("op", ""), str(line), code, output)
