"""What is caught and what is passed over; steps and names, as they arrive."""

from __future__ import annotations

from tensortap.api.lookup import get as fetch


def values(server, name):
    return [fetch(server.history, name, step=r.step) for r in server.history.records(name)]


def test_every_first_when_and_enable(server, run):
    program = run("""
        import json, tensortap as tap
        asked = []
        def third(value):
            asked.append(value)
            return value % 3 == 0
        for i in range(20):
            tap.catch(i, "every", every=5)
            tap.catch(i, "first", first=3)
            tap.catch(i, "both", every=4, first=2)
            tap.catch(i, "bool", when=i > 17)
            tap.catch(i, "function", when=third)
            tap.catch(i, "rare", every=10, when=lambda value: value)
            if i == 3: tap.enable(False)
            tap.catch(i, "on")
            tap.enable()
        assert tap.flush(60)
        r = tap.receipt()
        print(json.dumps([r.captured, r.skipped, r.dropped, len(asked)]))
    """)
    captured, skipped, dropped, asked = program.result()
    assert values(server, "every") == [0, 5, 10, 15]
    assert values(server, "first") == [0, 1, 2]
    assert values(server, "both") == [0, 4]
    assert values(server, "bool") == [18, 19]
    assert values(server, "function") == [0, 3, 6, 9, 12, 15, 18]
    assert values(server, "rare") == [10]
    assert values(server, "on") == [i for i in range(20) if i != 3]
    assert (captured, dropped, asked) == (38, 0, 20)
    assert skipped == 7 * 20 - 38


def test_changed_compares_contents(server, run):
    program = run("""
        import numpy as np, torch, tensortap as tap
        for size in (4, 100_000):
            x = torch.zeros(size)
            a = np.zeros(size, np.float32)
            for i in range(6):
                tap.catch(x, f"same tensor {size}", changed=True)
                tap.catch(x.clone(), f"other tensor {size}", changed=True)
                tap.catch(a, f"array {size}", changed=True)
                tap.catch([{"x": x}, 1], f"nested {size}", changed=True)
                if i == 2:
                    x[-1] = 5          # in place: the pointer stays
                    a[0] = -0.0        # equal, and yet other bits
                if i == 4:
                    x[-1] = 0          # back to what it was at first
        assert tap.flush(60)
        assert tap.receipt().reasons["error"] == 0
    """)
    program.end()
    for size in (4, 100_000):
        for name in ("same tensor", "other tensor", "nested"):
            assert [r.step for r in server.history.records(f"{name} {size}")] == [0, 3, 5], name
        assert [r.step for r in server.history.records(f"array {size}")] == [0, 3]
        assert fetch(server.history, f"same tensor {size}", 1)[-1] == 5
        records = server.history.records(f"same tensor {size}")
        assert all(r.digest for r in records)
        assert records[0].digest == records[2].digest != records[1].digest


def test_disabled_from_the_environment(server, run):
    program = run(
        """
        import sys, threading, tensortap as tap
        for i in range(5):
            assert not tap.catch(i, "x").wait(60)
        assert threading.active_count() == 1
        assert "zmq" not in sys.modules
        r = tap.receipt()
        assert (r.captured, r.dropped, r.skipped) == (0, 0, 5), str(r)
        tap.enable()
        assert tap.catch("on", "x").wait(60)
        """,
        fresh=True,
        TENSORTAP_DISABLE="1",
    )
    program.end()
    assert fetch(server.history, "x") == "on"
    assert server.history.written == 1


def test_steps_and_calls(server, run):
    run("""
        import tensortap as tap
        for i in range(3):
            tap.catch(i, "before")
        for i in range(3):
            tap.catch(i, "a"); tap.catch(i + 10, "a")
            if i: tap.catch(i, "late")
            tap.step()
        tap.step(100)
        tap.catch(7, "a"); tap.catch(8, "a"); tap.catch(9, "a")
        tap.step()
        tap.catch(10, "a", every=1)
        assert tap.flush(60)
    """).end()

    def where(name):
        return [(r.step, r.call, r.value) for r in server.history.records(name)]

    assert where("before") == [(0, 0, 0), (1, 0, 1), (2, 0, 2)]
    # step 0 is not known to be a step until the first tap.step(): calls count until then
    assert where("a") == [
        (0, 0, 0), (1, 0, 10), (1, 0, 1), (1, 1, 11), (2, 0, 2), (2, 1, 12),
        (100, 0, 7), (100, 1, 8), (100, 2, 9), (101, 0, 10),
    ]  # fmt: skip
    assert where("late") == [(1, 0, 1), (2, 0, 2)]
    order = [r.seq for name in server.history.names() for r in server.history.records(name)]
    assert sorted(order) == list(range(len(order)))
