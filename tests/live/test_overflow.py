"""More than the queue may hold: the latest of each name wins, or training waits."""

from __future__ import annotations

import json

import pytest


@pytest.mark.fault("SIGSTOP of a session")
def test_the_latest_of_each_name_wins(serving, run, row):
    where = serving(memory="64MB")
    program = run(
        """
        import json, numpy as np, tensortap as tap
        assert tap.catch(0, "first").wait(60)
        print("ready"); input()
        tickets = []
        for i in range(200):
            for name in "abcd":
                tickets.append(tap.catch(np.full(30_000, i), name))
        print("caught"); input()
        assert tap.flush(60)
        arrived = sum(t.wait(0) for t in tickets)
        assert all(t.done for t in tickets)
        r = tap.receipt()
        print(json.dumps([arrived, r.captured, r.dropped, r.skipped, r.reasons]))
        input()
        """,
        to=where.address,
        TENSORTAP_BUFFER="4MB",
    )
    assert program.line() == "ready"
    where.stop()
    program.say()
    assert program.line() == "caught"
    where.go_on()
    program.say()
    arrived, captured, dropped, skipped, reasons = json.loads(program.line())
    assert (skipped, reasons["over budget"]) == (0, dropped)
    assert captured + dropped == 801
    assert dropped > 600
    assert where.written() == captured == arrived + 1
    for name in "abcd":
        steps = where.ask(f"[r.step for r in server.history.records({name!r})]")
        assert steps == sorted(steps)
        assert steps[-1] == 199, (name, steps)
        assert where.ask(f"int(tap.get({name!r})[-1])") == 199
    program.say()
    program.end()
    client = row(where)
    assert client.dropped == dropped
    assert client.records == captured


@pytest.mark.fault("SIGSTOP of a session")
def test_blocking_loses_nothing(serving, run, wait_for):
    where = serving(memory="512MB")
    program = run(
        """
        import json, numpy as np, tensortap as tap
        from tensortap.capture.queue import Queue
        make_room = Queue._make_room
        def waits(*args):
            print("waits")
            return make_room(*args)
        Queue._make_room = waits
        assert tap.catch(0, "first").wait(60)
        print("ready"); input()
        for i in range(300):
            tap.catch(np.full(30_000, i), "x")
        assert tap.flush(60)
        r = tap.receipt()
        print(json.dumps([r.captured, r.dropped]))
        """,
        to=where.address,
        TENSORTAP_BUFFER="4MB",
        TENSORTAP_OVERFLOW="block",
    )
    assert program.line() == "ready"
    where.stop()
    program.say()
    assert program.line() == "waits"
    where.go_on()
    assert program.result() == [301, 0]
    assert where.ask("[r.step for r in server.history.records('x')]") == list(range(300))


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
