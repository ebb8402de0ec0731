"""Answers to the questions of viewers: the state of a server, and records of its history."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tensortap.core.buffers import view_of
from tensortap.core.errors import NotFound
from tensortap.core.history import payload_nbytes
from tensortap.core.record import Kind, Record, TensorData
from tensortap.core.values import tensors
from tensortap.live import messages as wire
from tensortap.live import questions
from tensortap.runs import rows
from tensortap.stats import summarize_array
from tensortap.text.records import is_hint, record_line
from tensortap.values.view import as_numpy

if TYPE_CHECKING:
    from tensortap.live.connection import ClientState
    from tensortap.live.server import Server

Computed = TypeVar("Computed")
RecordKey = tuple[str, str, int, int, int]

RECENT = 12
_LARGEST_TENSOR = 1 << 22  # bytes; larger ones without statistics are not read for a trend


def record_key(record: Record) -> RecordKey:
    """Return what identifies a record, without a reference to its value."""
    return record.name, record.kind.value, record.rank, record.seq, record.time_ns


class RecordCache(dict[RecordKey, Computed]):
    """A dict that evicts its oldest quarter when it is full."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __setitem__(self, key: RecordKey, computed: Computed) -> None:
        if len(self) >= self.size:
            for old in list(self)[: self.size // 4]:
                self.pop(old, None)
        super().__setitem__(key, computed)


_numbers: RecordCache[float | None] = RecordCache(1 << 16)
_lines: RecordCache[str] = RecordCache(4096)


def overview(server: Server) -> questions.Overview:
    """Return clients, names with their latest record, recent records, and all counts."""
    history = server.history
    evicted = dict(history.evicted)
    tails = history.tails(16)
    deadline = time.monotonic() + 0.05  # trends of many large tensors take longer
    trends = [trend(tail, deadline) if len(tail) > 1 else () for _, tail in tails]
    names = [
        _name_row(tail, held, evicted, numbers)
        for (held, tail), numbers in zip(tails, trends, strict=True)
        if tail[-1].kind is not Kind.ALERT
    ]
    found = [r for _, tail in tails for r in tail[-RECENT:] if r.kind is Kind.ALERT]
    alerts = [r for r in found if not is_hint(r)]
    alerts.sort(key=lambda r: (r.time_ns, r.seq))
    sources = [client for client in list(server.clients.values()) if client.role == "source"]
    return questions.Overview(
        address=str(server.address),
        pid=os.getpid(),
        started=server.started,
        written=history.written,
        written_nbytes=history.written_nbytes,
        nbytes=history.nbytes,
        bound=history.bound,
        evicted=sum(evicted.values()),
        rejected=dict(server.rejected),
        clients=tuple(map(_client_row, sources)),
        names=tuple(names),
        recent=tuple(_name_row([record], 1, evicted) for record in history.recent(RECENT)),
        alerts=tuple(_name_row([record], 1, evicted) for record in alerts[-RECENT:]),
    )


def trend(records: Sequence[Record], deadline: float) -> tuple[float, ...]:
    """Return one number for each record that has one, oldest to newest.

    Numbers that need a pass over a tensor are computed once, and only until the deadline. After
    it the oldest records are left out until the next call, so that a trend never has gaps.
    """
    numbers: list[float] = []
    for record in reversed(records):
        if record.stats is not None or not isinstance(record.value, TensorData):
            number = number_of(record)
        else:
            key = record_key(record)
            if key not in _numbers:
                if time.monotonic() > deadline:
                    break
                _numbers[key] = number_of(record)
            number = _numbers.get(key)
        if number is not None:
            numbers.append(number)
    return tuple(reversed(numbers))


def number_of(record: Record) -> float | None:
    """Return a number as it is, a tensor's root mean square; NaN if any element is not finite.

    >>> from tensortap.core.record import Kind
    >>> number_of(Record("loss", Kind.VALUE, 0, 0, 0, 0, 1, 0, value=0.5))
    0.5
    """
    value = record.value
    if isinstance(value, (bool, int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.copysign(math.inf, value)
    stats = record.stats
    if stats is None and isinstance(value, TensorData) and payload_nbytes(value) <= _LARGEST_TENSOR:
        try:
            stats = summarize_array(as_numpy(value))
        except (TypeError, ValueError):  # dates and strings
            return None
    if stats is None or not stats.count:
        return None
    if stats.finite < stats.count:
        return math.nan
    # the only element of a tensor keeps its sign
    return stats.min if stats.count == 1 else stats.rm2


def captures_per_second(records: Sequence[Record], now_ns: int | None = None) -> float:
    """Return the recent capture rate; 0 once captures have stopped.

    >>> from tensortap.core.record import Kind
    >>> each = [Record("x", Kind.VALUE, i, 0, i, 0, 1, i * 10**9) for i in range(5)]
    >>> captures_per_second(each, now_ns=5 * 10**9), captures_per_second(each, now_ns=60 * 10**9)
    (1.0, 0.0)
    """
    if len(records) < 2:
        return 0.0
    now = time.time_ns() if now_ns is None else now_ns
    interval = max((records[-1].time_ns - records[0].time_ns) / (len(records) - 1), 1.0)
    if now - records[-1].time_ns > max(4 * interval, 2e9):
        return 0.0
    return 1e9 / interval


def _name_row(
    tail: Sequence[Record], held: int, evicted: dict[str, int], numbers: tuple[float, ...] = ()
) -> questions.NameRow:
    record = tail[-1]
    key = record_key(record)
    line = _lines.get(key)
    if line is None:
        line = _lines[key] = record_line(record)
    rate = captures_per_second(tail)
    return questions.NameRow(_head(record), held, evicted.get(record.name, 0), line, numbers, rate)


def _client_row(client: ClientState) -> questions.ClientRow:
    info, connection = client.info, client.connection
    shared = connection is not None and connection.arena_pid is not None
    return questions.ClientRow(
        program=info.program,
        host=info.host,
        pid=info.pid,
        rank=info.rank,
        world_size=info.world_size,
        connected=client.connected,
        path="shared memory" if shared else "TCP",
        records=client.records,
        nbytes=client.nbytes,
        dropped=sum(client.dropped.values()),
        reasons=client.dropped,
    )


def _head(record: Record) -> Record:
    return msgspec.structs.replace(record, value=None)


def tensor_steps(server: Server, cursor: int) -> questions.TensorStepsList:
    """Return which of the records after a cursor hold tensors."""
    steps: dict[tuple[str, str], set[int]] = {}
    evicted = sum(server.history.evicted.values())
    cursor, records = server.history.since(cursor)
    for record in records:
        if tensors(record.value):
            steps.setdefault((record.name, record.kind.value), set()).add(record.step)
    rows = [questions.TensorSteps(*key, tuple(sorted(found))) for key, found in steps.items()]
    return questions.TensorStepsList(tuple(rows), cursor, server.started, evicted)


def answer(server: Server, what: str, arguments: dict[str, Any]) -> bytes:
    """Return the encoded answer to a viewer's question."""
    reply = _ANSWERS.get(what)
    if reply is None:
        raise NotFound(f"unknown question {what!r}")
    return reply(server, arguments)


def _heads(server: Server, arguments: dict[str, Any]) -> bytes:
    try:
        wanted = msgspec.convert(arguments, questions.Heads)
    except msgspec.ValidationError as error:
        raise NotFound(f"not a valid question for records: {error}") from None
    records = server.history.records(
        wanted.name, step=wanted.step, rank=wanted.rank, kind=wanted.kind, last=wanted.last
    )
    return _encode(questions.RecordList(records=tuple(map(_head, records))))


def _since(server: Server, arguments: dict[str, Any]) -> bytes:
    limit = min(max(_int(arguments.get("limit")), 1), 1 << 16)
    cursor, records = server.history.since(_int(arguments.get("cursor")), limit)
    return _encode(questions.RecordList(records=tuple(map(_plottable, records)), cursor=cursor))


def _plottable(record: Record) -> Record:
    """Return a record that keeps its value only if it is a number or an alert."""
    if record.kind is Kind.ALERT:
        return record
    return msgspec.structs.replace(record, value=rows.number_of(record.value))


def _load(server: Server, arguments: dict[str, Any]) -> bytes:
    wanted = tuple(arguments.get(key) for key in ("seq", "time_ns", "rank"))
    name, seq = str(arguments.get("name", "")), _int(arguments.get("seq"))
    for record in server.history.records(name, seq=seq):
        if (record.seq, record.time_ns, record.rank) == wanted:
            return wire.encode_records([record], lambda block: bytes(view_of(block)))
    raise NotFound("this record is no longer in the history: it was evicted")


def _int(argument: Any) -> int:
    return argument if isinstance(argument, int) else 0


_encode = msgspec.msgpack.Encoder().encode
_ANSWERS: dict[str, Callable[[Server, dict[str, Any]], bytes]] = {
    questions.OVERVIEW: lambda server, _: _encode(overview(server)),
    questions.NAMES: lambda server, _: _encode(
        questions.RecordList(names=tuple(server.history.names()))
    ),
    questions.HEADS: _heads,
    questions.LOAD: _load,
    questions.SINCE: _since,
    questions.TENSOR_STEPS: lambda server, arguments: _encode(
        tensor_steps(server, _int(arguments.get("cursor")))
    ),
}
