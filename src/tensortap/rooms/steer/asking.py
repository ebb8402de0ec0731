"""The session's side of steering: asks the programs of a job, and chooses the step of a change.

A change holds from a step that no rank has reached: the session asks all ranks where they are, adds
what the fastest one may do in the meantime, and announces that step. Nobody waits for anybody.
"""

from __future__ import annotations

import math
import secrets
import time
from typing import Any

import msgspec

from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.files import plain
from tensortap.core.probes import MOST, Probe, ProbeAnswer, ProbeRequest
from tensortap.live import messages as wire
from tensortap.live.connection import ClientState
from tensortap.live.server import Server

_PATIENCE = 1.5  # seconds that an answer may take: a busy program answers between two batches
_AHEAD = 1.0  # seconds until the step of a change, at the pace of the fastest rank
_decoder = msgspec.msgpack.Decoder(ProbeAnswer)
_encode = msgspec.msgpack.encode


class Program(msgspec.Struct, frozen=True):
    """A program of the session, one rank of its job; `trouble` says why it has not answered."""

    program: str
    host: str
    pid: int
    rank: int
    world_size: int
    step: int = -1
    probes: tuple[Probe, ...] = ()
    left_out: int = 0
    trouble: str = ""


class Announcement(msgspec.Struct, frozen=True):
    """A change that was announced: its number, the step from which it holds, and the programs."""

    number: int
    at: int
    seconds: float
    """When the slowest rank will have got there, as far as is known."""
    programs: tuple[Program, ...]


def _ask(server: Server, pattern: str = "", request: ProbeRequest | None = None) -> list[Any]:
    """Ask all programs; return each with its answer, None if it has given none in time."""
    number = secrets.randbits(40) + 1
    clients = server.control(wire.Control(number, pattern, request))
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        if all(client.answer[0] == number or not client.connected for client in clients):
            break
        time.sleep(0.005)
    return [(client, _read(client, number)) for client in clients]


def _read(client: ClientState, number: int) -> ProbeAnswer | None:
    answered, body = client.answer
    if answered != number:
        return None
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ProbeAnswer(refusal="an answer that cannot be decoded")


def _program(client: ClientState, answer: ProbeAnswer | None) -> Program:
    info = client.info
    who = plain(info.program, 300), plain(info.host, 100), info.pid, info.rank, info.world_size
    if answer is None:
        silent = f"it does not answer within {_PATIENCE} s: it is stopped, or overloaded"
        return Program(*who, trouble=silent if client.connected else "it has gone")
    refusal = f"it refuses: {plain(answer.refusal, 500)}" if answer.refusal else ""
    shown = tuple(
        msgspec.structs.replace(probe, name=plain(probe.name, 300), kind=plain(probe.kind, 60))
        for probe in answer.probes[:MOST]
    )
    left_out = max(0, answer.left_out) + len(answer.probes) - len(shown)
    return Program(*who, answer.step, shown, left_out, refusal)


def answer_probes(server: Server, arguments: dict[str, Any]) -> bytes:
    """Answer which probes the programs of a session have."""
    asked = _ask(server, str(arguments.get("pattern", ""))[:1000])
    return _encode([_program(*each) for each in asked])


def answer_probe(server: Server, arguments: dict[str, Any]) -> bytes:
    """Announce a change to all programs that are connected."""
    try:
        request = msgspec.convert(arguments, ProbeRequest)
    except msgspec.ValidationError as error:
        raise TensortapError(f"not a valid request: {error}") from None
    places = [(client, answer) for client, answer in _ask(server, "^$") if client.connected]
    if not places:
        raise NotFound("no program is connected to this session")
    answers = [answer for _, answer in places if answer is not None]
    step = max((answer.step for answer in answers), default=-1)
    paces = [answer.step_seconds for answer in answers if answer.step_seconds > 0]
    ahead = min(10_000, 1 + math.ceil(_AHEAD / min(paces))) if paces else 1
    at = 0 if step < 0 else step + ahead
    request = msgspec.structs.replace(request, at=at, number=secrets.randbits(40) + 1)
    asked = _ask(server, request=request)
    slowest = max((at - a.step) * a.step_seconds for a in answers) if paces else 0.0
    programs = tuple(_program(*each) for each in asked if each[0].connected or each[1])
    return _encode(Announcement(request.number, at, slowest, programs))
