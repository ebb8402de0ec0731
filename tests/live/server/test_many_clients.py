"""A session with as many connections as a large job has ranks."""

from __future__ import annotations

import resource
import subprocess
import sys
from textwrap import dedent

import psutil
import pytest

from tests.live.server.clients import assert_serves
from tests.processes import wait_for

PROCESSES, EACH = 4, 256
PROGRAM = """
    import sys
    import zmq
    from tensortap.live import messages as wire
    from tensortap.live.address import Address
    from tests.live.server.clients import RawClient, record

    port, first, count = map(int, sys.argv[1:])
    context = zmq.Context()
    address = Address("127.0.0.1", port)
    clients = [RawClient(address, context=context) for _ in range(count)]
    for rank, client in enumerate(clients, first):
        own = wire.Client(rank.to_bytes(16, "big"), program="raw", rank=rank)
        client.send_message(wire.HELLO, wire.Hello(wire.PROTOCOL, "0.1.0", "source", client=own))
    for client in clients:
        client.receive_a(wire.Welcome, 60)
    for round in range(2):
        print("ready", flush=True)
        sys.stdin.readline()
        for rank, client in enumerate(clients, first):
            loss = record("loss", float(rank), step=round, rank=rank)
            client.send_batch(wire.encode_records([loss]))
        for client in clients:
            client.receive_a(wire.Ack, 60)
    print("ready", flush=True)
    sys.stdin.readline()
    """


@pytest.mark.slow
@pytest.mark.fault("a thousand connections at once", tried=1024)
def test_serves_1024_connections(server, bystander):
    total = PROCESSES * EACH
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2 * total:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4 * total, hard), hard))
    before = psutil.Process().memory_info().rss
    crowd = [
        subprocess.Popen(
            [sys.executable, "-c", dedent(PROGRAM), str(server.address.port), str(n * EACH),
             str(EACH)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for n in range(PROCESSES)
    ]  # fmt: skip
    try:
        for _ in range(2):
            assert [process.stdout.readline() for process in crowd] == ["ready\n"] * PROCESSES
            for process in crowd:
                process.stdin.write("\n")
                process.stdin.flush()
        assert [process.stdout.readline() for process in crowd] == ["ready\n"] * PROCESSES
        assert len(server.clients) == total + 1
        assert sum(server.rejected.values()) == 0
        assert server.history.written == 2 * total + 1
        assert {r.rank for r in server.history.records("loss", step=1)} == set(range(total))
        grown = psutil.Process().memory_info().rss - before
        assert grown < total * (256 << 10)
        assert_serves(server)
    finally:
        for process in crowd:
            process.communicate("\n", timeout=60)
    wait_for(lambda: sum(c.connection is not None for c in server.clients.values()) == 1)
