"""The live sink, with a server in this process; tests/live has whole programs."""

from __future__ import annotations

import numpy as np
import pytest

from tensortap.buffers import Pool
from tensortap.frameworks import rebuild, snapshot
from tensortap.history import History
from tensortap.pipeline.ledger import Ledger
from tensortap.pipeline.queue import Queue
from tensortap.server.server import Server
from tensortap.sinks.live import LiveSink
from tensortap.wire.address import Address
from tests.sinks.contract import SinkContract, put, record

KEY = b"k" * 32


@pytest.fixture
def server():
    server = Server(Address("127.0.0.1", 0), History(64 << 20), KEY)
    yield server
    server.close()


@pytest.fixture
def connect(server):
    """Make queues to the server."""
    queues = []

    def connect(pool=None, **options):
        sink = LiveSink(server.address, pool or Pool(), Ledger(), key=KEY, **options)
        queues.append(Queue(sink, budget=32 << 20, name="test"))
        return queues[-1]

    yield connect
    for queue in queues:
        queue.close()


class TestContract(SinkContract):
    @pytest.fixture
    def queue(self, server, connect):
        self.server = server
        return connect()

    def arrived(self, queue):
        return self.server.history.since(0)[1]


class TestContractOverTCP(TestContract):
    @pytest.fixture
    def queue(self, server, connect):
        self.server = server
        return connect(arena=False)


def large(pool, number, nbytes):
    array = np.full(nbytes, number, np.uint8)
    return array, record("x", snapshot(array, pool)[0])


def test_lends_memory_up_to_its_limit_and_sends_the_rest(server, connect):
    pool = Pool()
    queue = connect(pool, limit=3 << 20)
    sent = []
    for i in range(6):
        array, one = large(pool, i, 1 << 20)
        sent.append(array)
        assert put(queue, one, array.nbytes).wait(10)
    del one
    assert len(queue.sink.arena) == 3
    arrived = [rebuild(r.value) for r in server.history.since(0)[1]]
    assert all(np.array_equal(a, b) for a, b in zip(arrived, sent, strict=True))


def test_lends_again_what_the_server_has_freed(server, connect):
    pool = Pool()
    queue = connect(pool, limit=40 << 20)
    for i in range(40):  # the history holds 64 MB
        array, one = large(pool, i, 8 << 20)
        assert put(queue, one, array.nbytes).wait(10)
    del one
    assert 1 <= len(queue.sink.arena) <= 5
    assert np.array_equal(rebuild(server.history.since(0)[1][-1].value), array)
