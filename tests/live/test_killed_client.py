"""A training program that dies in the middle of a message disturbs nobody."""

from __future__ import annotations

import signal

import pytest

from tests.live.talking import TALKS, Talker, segments, shared_files

PATHS = {"shared memory": "", "TCP": "1"}

# sends large tensors as fast as it can, for ever
FLOOD = """
    import numpy as np, tensortap as tap
    x = np.arange(4_000_000)
    assert tap.catch(x[:3], "start").wait(60)
    print("ready")
    while True:
        tap.catch(x, "flood")
"""


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.fault("kill -9 of a training program")
def test_client_killed_inside_a_large_message(serving, run, wait_for, path):
    before = shared_files()
    where = serving(memory="512MB")
    flood = run(FLOOD, to=where.address, TENSORTAP_NO_ARENA=PATHS[path])
    other = Talker(run(TALKS, to=where.address))
    assert flood.line() == "ready"
    other("catch(1, wait=60)")
    wait_for(lambda: where.ask("len(server.history.records('flood'))") > 3)
    flood.kill()
    other("catch(20, size=10_000, wait=60)")
    assert other("receipt()")["captured"] == 21
    assert where.ask("len(server.history.records('x'))") == 21
    wait_for(lambda: where.ask("sum(c.connected for c in server.clients.values())") == 1)
    # what has arrived is whole
    expected = "int(tap.get('flood').sum()) == 4_000_000 * 3_999_999 // 2"
    assert where.ask(expected)
    assert where.ask("dict(server.rejected)") == {}
    assert (
        where.ask(
            "sum(len(c.connection.assemblies) for c in server.clients.values() if c.connected)"
        )
        == 0
    )
    assert shared_files() == before
    # the server has copied what arrived, and keeps none of its memory
    wait_for(lambda: segments(where.pid) <= 1, what=lambda: segments(where.pid))


@pytest.mark.fault("SIGSTOP of a training program")
def test_a_client_stopped_inside_a_message_does_not_delay_others(server, run, wait_for):
    flood = run(FLOOD, TENSORTAP_NO_ARENA="1")
    assert flood.line() == "ready"
    flood.signal(signal.SIGSTOP)
    others = [Talker(run(TALKS)) for _ in range(2)]
    for other in others:
        other("catch(30, size=20_000, wait=60)")
        assert other("receipt()")["captured"] == 30
    flood.signal(signal.SIGCONT)
    seen = len(server.history.records("flood"))
    wait_for(lambda: len(server.history.records("flood")) > seen)
