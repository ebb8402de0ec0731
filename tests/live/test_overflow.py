"""More than the queue may hold: the latest of each name wins, or training waits."""

from __future__ import annotations

import json

import pytest


@pytest.mark.fault("kill -9 of a session")
def test_blocking_ends_when_the_server_dies(serving, run, wait_for):
    where = serving()
    program = run(
        """
        import numpy as np, tensortap as tap
        assert tap.catch(0, "first").wait(60)
        print("ready"); input()
        for i in range(100):
            tap.catch(np.full(30_000, i), "x")
        r = tap.receipt()
        assert r.captured + r.dropped == 101, str(r)
        print("done")
        """,
        to=where.address,
        TENSORTAP_BUFFER="2MB",
        TENSORTAP_OVERFLOW="block",
    )
    assert program.line() == "ready"
    where.stop()
    program.say()
    where.kill()
    assert program.line() == "done"


@pytest.mark.parametrize("arena", ["", "1"], ids=["shared memory", "TCP"])
def test_a_value_larger_than_the_history_is_dropped_alone(serving, run, wait_for, row, arena):
    where = serving(memory="16MB")
    program = run(
        """
        import json, numpy as np, tensortap as tap
        assert tap.catch(0, "first").wait(60)
        tickets = [tap.catch(i, "before") for i in range(5)]
        big = [tap.catch(np.ones(3_000_000), "big") for _ in range(2)]
        tickets += [tap.catch(np.full(10_000, i), "after") for i in range(5)]
        assert [t.wait(60) for t in big] == [False, False]
        assert all(t.wait(60) for t in tickets)
        assert tap.catch(np.ones(3_000_000), "big").wait(60) is False
        r = tap.receipt()
        print(json.dumps([r.captured, r.reasons, r.dropped, r.sessions.popitem()[1]]))
        input()
        """,
        to=where.address,
        TENSORTAP_NO_ARENA=arena,
    )
    captured, reasons, dropped, state = json.loads(program.line())
    assert (captured, dropped, reasons["too large"]) == (11, 3, 3)
    assert state == ("connected, over TCP" if arena else "connected, through shared memory")
    held = where.ask("[len(server.history.records(n)) for n in ('before', 'after', 'big')]")
    assert held == [5, 5, 0]
    program.say()
    program.end()
    assert row(where).reasons["too large"] == 3
