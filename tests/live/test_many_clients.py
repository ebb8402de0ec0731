"""Two hundred connections on one session."""

from __future__ import annotations

import signal

import pytest

from tensortap.api.lookup import get as fetch
from tensortap.live import answers

# ten sinks, each with an id, a socket and a thread of its own, as ten programs have them
TEN = """
    import os, time
    import numpy as np
    from tensortap.values import snapshot
    from tensortap.core.buffers import Pool
    from tensortap.live.address import parse_address
    from tensortap.core.record import Kind, Record
    from tensortap.capture.ledger import Ledger
    from tensortap.capture.queue import Queue, write_to
    from tensortap.live.sink import LiveSink

    number = int(os.environ["NUMBER"])
    def make(k):
        pool = Pool()
        sink = LiveSink(parse_address(), pool, Ledger(), arena=k % 2 == 0)
        return pool, Queue(sink, budget=100 << 20, overflow="block", name=f"{k}")
    queues = [make(k) for k in range(10)]
    tickets = []
    for i in range(20):
        for k, (pool, queue) in enumerate(queues):
            value, nbytes = snapshot(np.full(3000 if i % 2 else 3, i), pool)
            record = Record("x", Kind.VALUE, i, 0, i, number * 10 + k, 200, time.time_ns(),
                            "numpy.ndarray", "int64", value.shape, None, None, value)
            assert queue.admit(nbytes, "x", Kind.VALUE, i, record.rank)
            tickets.append(write_to([queue], record, nbytes))
    assert all(t.wait(60) for t in tickets)
    print("sent"); input()
    for _, queue in queues:
        queue.close()
"""


@pytest.mark.fault("SIGSTOP of a training program")
@pytest.mark.slow
def test_two_hundred_connections_in_twenty_processes(server, run, wait_for):
    programs = [run(TEN, NUMBER=str(n), TENSORTAP_ARENA="1MB") for n in range(20)]
    for program in programs:
        assert program.line() == "sent"
    assert sum(client.connected for client in server.clients.values()) == 200
    # one of them stands still in the middle of all: nobody waits for it
    programs[7].signal(signal.SIGSTOP)
    late = run("""
        import tensortap as tap
        for i in range(50):
            assert tap.catch(i, "late").wait(60)
    """)
    late.end()
    programs[7].signal(signal.SIGCONT)
    clients = answers.overview(server).clients
    assert sum(client.connected for client in clients) >= 200
    assert sorted(client.records for client in clients) == [20] * 200 + [50]
    assert not server.rejected
    for rank in range(200):
        records = [r for r in server.history.records("x") if r.rank == rank]
        assert [r.step for r in records] == list(range(20))
    for rank in (0, 73, 199):
        value = fetch(server.history, "x", step=19, rank=rank)
        assert value.shape == (3000,)
        assert (value == 19).all()
    for program in programs:
        program.say()
    for program in programs:
        program.end()
    wait_for(lambda: not any(client.connected for client in server.clients.values()))
    assert not server.rejected


# two hundred processes that all begin at the same moment
CROWD = """
    import json, os, sys
    import tensortap as tap, tensortap.live.sink, tensortap.capture.queue
    results, starts = os.pipe(), os.pipe()
    for rank in range(200):
        if not os.fork():
            os.close(starts[1])
            os.read(starts[0], 1)
            for i in range(3):
                tap.catch(float(i), "x")
            flushed = tap.flush(60)
            r = tap.receipt()
            line = [flushed, r.captured, r.dropped, list(r.sessions.values())[0].split(",")[0]]
            os.write(results[1], json.dumps(line).encode() + b"\\n")
            os._exit(0)
    for fd in (results[1], *starts):
        os.close(fd)
    with os.fdopen(results[0]) as lines:
        print(json.dumps([json.loads(line) for line in lines]))
"""


@pytest.mark.slow
@pytest.mark.fault("two hundred programs at once", tried=200)
def test_two_hundred_processes_at_once(server, run):
    """All are heard, and a receipt straight after the flush is true."""
    assert run(CROWD).result() == [[True, 3, 0, "connected"]] * 200
    assert server.history.written == 600
    assert not server.rejected
