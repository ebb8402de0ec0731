"""Messages of steering from those who mean harm, on both ends of the wire."""

from __future__ import annotations

import random
import threading

import msgspec
import pytest

from tensortap.core.errors import WireError
from tensortap.core.probes import Probe, ProbeAnswer, ProbeRequest, probes
from tensortap.live import messages as wire
from tests.live.server.clients import RawClient
from tests.processes import wait_for

ESCAPE = "\x1b[2J\n"


@pytest.mark.attack("wrong key")
def test_nobody_steers_without_the_key(session):
    with RawClient(session.address) as program, RawClient(session.address, key=b"\1" * 32) as other:
        program.connect()
        other.send_message(wire.QUERY, wire.Query(1, "probe", {"pattern": "x", "every": 0}))
        wait_for(lambda: session.server.rejected["wrong key"] > 0)
        assert program.receive(0.2) is None


STATES = {
    "nothing": b"", "garbage": b"\xc1", "nested": b"\x91" * 5000 + b"\x90", "a number": b"\x07",
    "not UTF-8": b"\x81\xa7refusal\xa1\xff",
    "escapes": msgspec.msgpack.encode(
        ProbeAnswer(3, 0.1, (Probe(ESCAPE * 200, ESCAPE),), -5, ESCAPE)
    ),
    "many": msgspec.msgpack.encode(ProbeAnswer(1 << 62, -1.0, (Probe("x", "y"),) * 5000)),
}  # fmt: skip


@pytest.mark.attack("garbage on the wire")
def test_answers_of_a_hostile_program(session):
    """What a program answers is bounded and cannot write to a terminal; others are still asked."""
    bodies = list(STATES.values())
    with RawClient(session.address) as program:
        program.connect()

        def answer():
            for body in bodies:
                asked = program.receive_a(wire.Control)
                program.send_message(wire.STATE, wire.State(asked.number), body)

        answering = threading.Thread(target=answer)
        answering.start()
        for what in STATES:
            (found,) = session.probes()
            assert len(found.probes) <= 2000, what
            shown = [found.trouble, *(p.name + p.kind for p in found.probes)]
            assert all(each.isprintable() and len(each) < 700 for each in shown), what
        answering.join()
    assert session.server.alive


REQUESTS = [
    {"action": "exec"}, {"pattern": "x" * 1001}, {"every": -1}, {"every": 1 << 50}, {"at": 1.5},
    {"kind": ["x"] * 21}, {"kind": "gradient"}, {"code": "import os"}, {"steps": None},
    {"by": ["x"]}, {"recompile": "yes"},
]  # fmt: skip


@pytest.mark.attack("garbage on the wire")
def test_hostile_requests_reach_no_program(session):
    with RawClient(session.address) as program, RawClient(session.address) as viewer:
        program.connect()
        viewer.connect(role="viewer")
        for number, arguments in enumerate(REQUESTS, 1):
            viewer.send_message(wire.QUERY, wire.Query(number, "probe", arguments))
            assert "not a valid request" in viewer.receive_a(wire.Reply).error
        assert program.receive(0.2) is None


def test_hostile_requests_at_a_program():
    """Whatever arrives is a request within its bounds, or no message; it never raises."""
    rng = random.Random(0)
    good = ProbeRequest("trace", "a.b", ("gradient",), 3, True, 2, 7, True, 9, "me")
    frames = [msgspec.msgpack.encode(wire.Control(5, ".", request)) for request in (good, None)]
    read = 0
    for _ in range(4000):
        frame = bytearray(rng.choice(frames))
        for _ in range(rng.randint(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        try:
            header = wire.read_header(wire.CONTROL, bytes(frame))
        except WireError:
            continue
        read += 1
        if header.request is not None:
            assert header.request.every <= 1 << 40
            assert len(header.request.pattern) <= 1000
        answer = probes.receive(header.request, header.pattern, 3)
        assert len(answer.refusal) <= 500
    probes.waiting.clear()
    assert 100 < read < 4000
