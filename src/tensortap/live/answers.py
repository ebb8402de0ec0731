"""The questions of viewers, and the answers: the state of a server, records of its history."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from tensortap.core.buffers import view_of
from tensortap.core.errors import NotFound
from tensortap.core.record import Kind, Record
from tensortap.core.rooms import offers
from tensortap.core.values import tensors
from tensortap.live import messages as wire
from tensortap.runs import rows
from tensortap.text.records import is_hint, record_line

if TYPE_CHECKING:
    from tensortap.live.connection import ClientState
    from tensortap.live.server import Server

RECENT = 12  # records and alerts of an overview
_INTERNAL = "tensortap."  # names of records that are no values of the program


class Heads(msgspec.Struct, frozen=True):
    """The arguments of ``heads``: the records of a name, and with `last` the newest ones."""

    name: str
    step: int | None = None
    rank: int | None = None
    kind: Kind | None = None
    last: Annotated[int, msgspec.Meta(ge=1)] | None = None


class ClientRow(msgspec.Struct, frozen=True):
    """A program that sends records, or has sent some."""

    program: str
    host: str
    pid: int
    rank: int
    world_size: int
    connected: bool
    path: str  # how tensors arrive: shared memory or TCP
    records: int
    nbytes: int
    dropped: int  # values that the program did not send, for any of the `reasons`
    reasons: dict[str, int]


class NameRow(msgspec.Struct, frozen=True):
    """A name with its latest record, as text in `line`; `head` is that record without its value.

    `trend` has one number for each of the last records that has one, see `number_of`.
    """

    head: Record
    records: int  # in the history
    evicted: int
    line: str
    trend: tuple[float, ...] = ()


class Overview(msgspec.Struct, frozen=True):
    """The state of a server: its counts, its clients, and its names with their latest records."""

    address: str
    pid: int
    started: float
    written: int
    written_nbytes: int
    nbytes: int
    bound: int
    evicted: int
    rejected: dict[str, int]
    clients: tuple[ClientRow, ...]
    names: tuple[NameRow, ...]
    recent: tuple[NameRow, ...]
    alerts: tuple[NameRow, ...] = ()  # the most recent ones


class RecordList(msgspec.Struct, frozen=True):
    """Names or records; `cursor` is what to ask for later ones with."""

    names: tuple[str, ...] = ()
    records: tuple[Record, ...] = ()
    cursor: int = 0


class TensorSteps(msgspec.Struct, frozen=True):
    """The steps at which whole tensors of a name and kind are in the history."""

    name: str
    kind: str
    steps: tuple[int, ...]


class TensorStepsList(msgspec.Struct, frozen=True):
    """A page of whole tensors, after a cursor.

    Earlier answers stay valid as long as `started` and `evicted` have not changed.
    """

    rows: tuple[TensorSteps, ...]
    cursor: int
    started: float
    evicted: int


_lines: dict[tuple[str, str, int, int, int], str] = {}


def overview(server: Server) -> Overview:
    """Return clients, names with their latest record, recent records, and all counts."""
    history = server.history
    evicted = dict(history.evicted)
    tails = [(n, tail) for n, tail in history.tails(16) if not _is_internal(tail[-1])]
    names = [
        _name_row(tail, held, evicted) for held, tail in tails if tail[-1].kind is not Kind.ALERT
    ]
    found = [r for _, tail in tails for r in tail[-RECENT:] if r.kind is Kind.ALERT]
    alerts = [r for r in found if not is_hint(r)]
    alerts.sort(key=lambda r: (r.time_ns, r.seq))
    sources = [client for client in list(server.clients.values()) if client.role == "source"]
    return Overview(
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
        recent=tuple(
            _name_row([r], 1, evicted) for r in history.recent(RECENT) if not _is_internal(r)
        ),
        alerts=tuple(_name_row([record], 1, evicted) for record in alerts[-RECENT:]),
    )


def _is_internal(record: Record) -> bool:
    return record.name.startswith(_INTERNAL)


def number_of(record: Record) -> float | None:
    """Return a number as it is, a tensor's root mean square; NaN if any element is not finite.

    None for tensors without statistics: large ones would take too long to read.
    """
    stats = record.stats
    if stats is None:
        return rows.number_of(record.value)
    if not stats.count:
        return None
    if stats.finite < stats.count:
        return math.nan
    # the only element of a tensor keeps its sign
    return stats.min if stats.count == 1 else stats.rm2


def _name_row(tail: Sequence[Record], held: int, evicted: dict[str, int]) -> NameRow:
    record = tail[-1]
    # without a reference to its value
    key = record.name, record.kind.value, record.rank, record.seq, record.time_ns
    line = _lines.get(key)
    if line is None:
        if len(_lines) >= 1 << 14:
            _lines.clear()
        line = _lines[key] = record_line(record)
    numbers = tuple(n for n in map(number_of, tail) if n is not None) if len(tail) > 1 else ()
    return NameRow(_head(record), held, evicted.get(record.name, 0), line, numbers)


def _client_row(client: ClientState) -> ClientRow:
    info, connection = client.info, client.connection
    shared = connection is not None and connection.arena_pid is not None
    return ClientRow(
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


def tensor_steps(server: Server, cursor: int) -> TensorStepsList:
    """Return which of the records after a cursor hold tensors."""
    steps: dict[tuple[str, str], set[int]] = {}
    evicted = sum(server.history.evicted.values())
    cursor, records = server.history.since(cursor)
    for record in records:
        if tensors(record.value):
            steps.setdefault((record.name, record.kind.value), set()).add(record.step)
    rows = [TensorSteps(*key, tuple(sorted(found))) for key, found in steps.items()]
    return TensorStepsList(tuple(rows), cursor, server.started, evicted)


def answer(server: Server, what: str, arguments: dict[str, Any]) -> bytes:
    """Return the encoded answer to a viewer's question."""
    reply = _ANSWERS.get(what)
    for of_room in offers(f"session.answer.{what}") if reply is None else ():
        return bytes(of_room(server, arguments))
    if reply is None:
        raise NotFound(f"unknown question {what!r}")
    return reply(server, arguments)


def _heads(server: Server, arguments: dict[str, Any]) -> bytes:
    try:
        wanted = msgspec.convert(arguments, Heads)
    except msgspec.ValidationError as error:
        raise NotFound(f"not a valid question for records: {error}") from None
    records = server.history.records(
        wanted.name, step=wanted.step, rank=wanted.rank, kind=wanted.kind, last=wanted.last
    )
    return _encode(RecordList(records=tuple(map(_head, records))))


def _since(server: Server, arguments: dict[str, Any]) -> bytes:
    cursor, records = server.history.since(_int(arguments.get("cursor")), 1 << 14)
    return _encode(RecordList(records=tuple(map(_plottable, records)), cursor=cursor))


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
    "overview": lambda server, _: _encode(overview(server)),
    "names": lambda server, _: _encode(RecordList(names=tuple(server.history.names()))),
    "heads": _heads,
    "load": _load,
    "since": _since,
    "tensor_steps": lambda server, asked: _encode(tensor_steps(server, _int(asked.get("cursor")))),
}
