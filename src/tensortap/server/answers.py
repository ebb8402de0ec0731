"""What a live session tells about itself: to this process, and to viewers that ask."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from tensortap.api import glance, trends
from tensortap.buffers import view_of
from tensortap.errors import NotFound
from tensortap.record import Fields, Items, Kind, Mapping, Record, TensorData, Value
from tensortap.runs.format import number_of
from tensortap.server.client import Peer
from tensortap.server.server import Server
from tensortap.wire import messages as wire
from tensortap.wire import questions

RECENT = 12
_trends = trends.Trends()
_looking = threading.Lock()  # the session's thread answers viewers, another one its own user
_NEWER = 1 << 16  # records that one answer tells of


def overview(server: Server) -> questions.Overview:
    """Clients, names with their latest capture, recent captures, and all counts."""
    history = server.history
    evicted = dict(history.evicted)
    tails = history.tails(trends.LAST)
    with _looking:
        _trends.look()
        names = [_row(t, held, evicted) for held, t in tails if t[-1].kind is not Kind.ALERT]
    recent = [_row([record], 1, evicted) for record in history.recent(RECENT)]
    alarms = [r for _, tail in tails for r in tail[-RECENT:] if r.kind is Kind.ALERT]
    alarms.sort(key=lambda r: (r.time_ns, r.seq))
    peers = [peer for peer in list(server.peers.values()) if peer.role == "source"]
    return questions.Overview(
        address=str(server.address),
        pid=os.getpid(),
        started=server.started,
        written=history.written,
        written_nbytes=history.written_nbytes,
        nbytes=history.nbytes,
        bound=history.bound,
        evicted=sum(evicted.values()),
        refused=dict(server.refused),
        clients=tuple(_client(peer) for peer in peers),
        names=tuple(names),
        recent=tuple(recent),
        alerts=tuple(_row([record], 1, evicted) for record in alarms[-RECENT:]),
    )


def _row(tail: list[Record], held: int, evicted: dict[str, int]) -> questions.NameRow:
    record = tail[-1]
    gone = evicted.get(record.name, 0)
    trend = _trends.of(tail) if len(tail) > 1 else ()
    rate = trends.rate_of(tail)
    return questions.NameRow(_head(record), held, gone, glance.line(record), trend, rate)


def _client(peer: Peer) -> questions.ClientRow:
    who, tally = peer.who, peer.tally
    return questions.ClientRow(
        program=who.program,
        host=who.host,
        pid=who.pid,
        rank=who.rank,
        world_size=who.world_size,
        connected=peer.connected,
        path="shared memory" if peer.arena_pid is not None else "TCP",
        records=peer.records,
        nbytes=peer.nbytes,
        unheard=tally.unheard,
        dropped=tally.dropped,
        failed=tally.failed,
    )


def _head(record: Record) -> Record:
    return msgspec.structs.replace(record, value=None)


def answer(server: Server, what: str, arguments: dict[str, Any]) -> bytes:
    """The body of the reply to a viewer's question."""
    reply = _ANSWERS.get(what)
    if reply is None:
        raise NotFound(f"this session does not know the question {what!r}: upgrade it")
    return reply(server, arguments)


def _heads(server: Server, arguments: dict[str, Any]) -> bytes:
    records = server.history.records(str(arguments.get("name", "")))
    return _encode(questions.Rows(records=tuple(_head(record) for record in records)))


def _newer(server: Server, arguments: dict[str, Any]) -> bytes:
    mark, most = (_whole(arguments.get(key)) for key in ("mark", "most"))
    mark, records = server.history.newer(mark, min(max(most, 1), _NEWER))
    heads = tuple(map(_plotted, records))
    return _encode(questions.Rows(records=heads, mark=mark))


def _plotted(record: Record) -> Record:
    """A record with its value where that is a number, or an alert: whoever draws needs no more."""
    if record.kind is Kind.ALERT:
        return record
    return msgspec.structs.replace(record, value=number_of(record.value))


def held(server: Server, mark: int) -> questions.Held:
    """Which of the records after a mark hold tensors."""
    found: dict[tuple[str, str], set[int]] = {}
    evicted = sum(server.history.evicted.values())
    mark, records = server.history.newer(mark)
    for record in records:
        if _has_tensor(record.value):
            found.setdefault((record.name, record.kind.value), set()).add(record.step)
    rows = (questions.HeldRow(*key, tuple(sorted(steps))) for key, steps in found.items())
    return questions.Held(tuple(rows), mark, server.started, evicted)


def _has_tensor(value: Value) -> bool:
    if isinstance(value, TensorData):
        return True
    if isinstance(value, Items):
        return any(map(_has_tensor, value.items))
    if isinstance(value, Mapping):
        return any(_has_tensor(each) for _, each in value.items)
    return isinstance(value, Fields) and any(map(_has_tensor, value.values))


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _load(server: Server, arguments: dict[str, Any]) -> bytes:
    wanted = tuple(arguments.get(key) for key in ("seq", "time_ns", "rank"))
    for record in server.history.records(str(arguments.get("name", ""))):
        if (record.seq, record.time_ns, record.rank) == wanted:
            return wire.encode_records([record], lambda block: bytes(view_of(block)))
    raise NotFound("that capture is no longer held: it made room for newer ones")


_encode = msgspec.msgpack.Encoder().encode
_ANSWERS: dict[str, Callable[[Server, dict[str, Any]], bytes]] = {
    questions.OVERVIEW: lambda server, _: _encode(overview(server)),
    questions.NAMES: lambda server, _: _encode(questions.Rows(names=tuple(server.history.names()))),
    questions.HEADS: _heads,
    questions.LOAD: _load,
    questions.NEWER: _newer,
    questions.HELD: lambda server, said: _encode(held(server, _whole(said.get("mark")))),
}
