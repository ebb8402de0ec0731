"""The memory of a session is bounded, and what somebody holds stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

PATHS = {"shared memory": "", "TCP": "1"}


def rss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


@pytest.mark.parametrize("path", PATHS)
def test_memory_stays_within_its_bound(serving, run, path):
    where = serving(memory="64MB")
    where.ask("__import__('numpy') and 1")
    before = rss(where.pid)
    program = run(
        """
        import json, numpy as np, tensortap as tap
        for i in range(160):
            tap.catch(np.full(250_000, i), "big")         # 2 MB: 320 MB in all
            tap.catch(np.full(100, i), "small")
            if not i % 100:
                tap.catch(np.full(100_000, i), "rare")
        assert tap.flush(60)
        r = tap.receipt()
        from tensortap.capture.pipeline import pipeline
        print(json.dumps([r.captured, r.dropped, pipeline.pool.nbytes]))
        """,
        to=where.address,
        TENSORTAP_NO_ARENA=PATHS[path],
        TENSORTAP_OVERFLOW="block",
        TENSORTAP_BUFFER="32MB",
    )
    captured, dropped, pool = program.result()
    assert (captured, dropped) == (322, 0)
    assert where.ask("server.history.nbytes") <= 64 << 20
    assert rss(where.pid) - before < 150e6
    assert pool < 64e6 * 1.25 + 32e6 + 64e6
    held = where.ask("{n: len(server.history.records(n)) for n in server.history.names()}")
    gone = where.ask("dict(server.history.evicted)")
    assert {n: held[n] + gone.get(n, 0) for n in held} == {"big": 160, "small": 160, "rare": 2}
    # the most repeated go first; what is rare stays
    assert held["rare"] == 2
    assert 0 < held["big"] < 33
    steps = where.ask("[r.step for r in server.history.records('big')]")
    assert steps == list(range(160 - held["big"], 160))
    assert where.ask("answers.overview(server).evicted") == gone["big"] + gone.get("small", 0)
    content = where.ask("[[int(x[0]), int(x[-1])] for x in tap.get_all('big')]")
    assert content == [[step, step] for step in steps]


# records as `tap.track` makes them: statistics and no value
TRACKED = """
    import random, time
    from tensortap.core.buffers import Pool
    from tensortap.capture.ledger import Ledger
    from tensortap.capture.queue import Queue, write_to
    from tensortap.core.record import Kind, Record, Summary
    from tensortap.live.sink import LiveSink
    from tensortap.live.address import parse_address

    rng = random.Random(0)
    sink = LiveSink(parse_address(), Pool(), Ledger())
    queue = Queue(sink, budget=16 << 20, overflow="block", name="tracked")
    for i in range(30_000):
        bins = tuple(rng.choices(range(3000), k=rng.randrange(60)))
        numbers = [rng.random() for _ in range(10)]
        stats = Summary(28_672, rng.randrange(1000), 0, 0, 0, *numbers, -40, bins)
        name = f"blocks.{i % 200}.attention.output.dense.weight"
        record = Record(name, Kind.GRADIENT, i // 200, 0, i, 0, 1, time.time_ns(),
                        "torch.Tensor", "float32", (64, 448), stats=stats)
        assert queue.admit(0, name, Kind.GRADIENT, i // 200, 0)
        write_to([queue], record, 0)
    assert queue.flush(60)
    queue.close()
"""


@pytest.mark.slow
def test_memory_of_tracked_records_is_what_is_counted(serving, run):
    where = serving(memory="32MB")
    run("import tensortap as tap; assert tap.catch(1.0, 'warm').wait(60)", to=where.address).end()
    where.ask("answers.overview(server).written")
    before = rss(where.pid)
    run(TRACKED, to=where.address).end()
    taken = rss(where.pid) - before
    counted = where.ask("server.history.nbytes")
    assert where.ask("sum(server.history.evicted.values())") > 10_000
    assert 0.95 * (32 << 20) < counted <= 32 << 20
    assert 0.8 * counted < taken < 1.2 * counted


# caught values that travel and stay as columns: of one name, and of many in turn
SMALL = """
    import numpy as np, tensortap as tap
    from tensortap.capture.pipeline import pipeline
    assert tap.catch(1.0, "warm").wait(60)
    for i in range(60_000):
        tap.catch(np.full(256, i, "f4"), f"blocks.{i % NAMES}.attention.output.dense.weight")
    assert tap.flush(60)
    assert not tap.receipt().dropped
"""


@pytest.mark.slow
@pytest.mark.parametrize("names", [1, 20])
def test_memory_of_columns_is_what_is_counted(serving, run, names):
    where = serving(memory="32MB")
    run("import tensortap as tap; assert tap.catch(1.0, 'warm').wait(60)", to=where.address).end()
    where.ask("answers.overview(server).written")
    before = rss(where.pid)
    overflow = {"TENSORTAP_OVERFLOW": "block", "TENSORTAP_BUFFER": "8MB"}
    run(SMALL.replace("NAMES", str(names)), to=where.address, **overflow).end()
    taken = rss(where.pid) - before
    counted = where.ask("server.history.nbytes")
    assert where.ask("sum(server.history.evicted.values())") > 25_000
    assert where.ask("server.history.written") == 60_002
    assert 0.95 * (32 << 20) < counted <= 32 << 20
    assert 0.8 * counted < taken < 1.2 * counted
    held = where.ask("server.history.records('blocks.0.attention.output.dense.weight')[-1].step")
    assert held == 60_000 // names - 1
