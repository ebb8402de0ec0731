"""The live sink, with a server in this process; tests/live has whole programs."""

from __future__ import annotations

import numpy as np
import pytest

from tensortap.capture.ledger import Ledger
from tensortap.capture.pipeline import Pipeline
from tensortap.capture.queue import Queue
from tensortap.core.buffers import Pool
from tensortap.core.history import History
from tensortap.core.record import TensorData
from tensortap.live import messages as wire
from tensortap.live import sink as live
from tensortap.live.address import Address
from tensortap.live.server import Server
from tensortap.live.sink import Flight, LiveSink
from tensortap.values import rebuild, snapshot
from tests.capture.sink_contract import SinkContract, put, record

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


def _flight(one):
    ticket = None
    return Flight(b"", [one.value.data], [(one, ticket, one.value.data.nbytes)], 0)


def large(pool, number, nbytes):
    array = np.full(nbytes, number, np.uint8)
    return array, record("x", snapshot(array, pool)[0])


def test_sends_what_does_not_fit_into_the_arena(server, connect):
    pool = Pool(3 << 20)
    queue = connect(pool)
    sent = []
    for i in range(6):
        array, one = large(pool, i, (i + 1) << 20)
        sent.append(array)
        assert put(queue, one, array.nbytes).wait(60)
    arrived = [rebuild(r.value) for r in server.history.since(0)[1]]
    assert all(np.array_equal(a, b) for a, b in zip(arrived, sent, strict=True))


@pytest.mark.parametrize("arena", [True, False])
def test_sends_values_that_wait_together_in_few_batches_on_one_host(server, arena):
    pool = Pool()
    sink = LiveSink(Address("127.0.0.1", 0), pool, Ledger(), key=KEY, arena=arena)
    queue = Queue(sink, budget=32 << 20, name="test")
    values = [large(pool, i, (i + 1) << 18) for i in range(8)]
    for array, one in values:
        put(queue, one, array.nbytes)
    sink.address = server.address
    assert queue.flush(60)
    arrived = [rebuild(r.value) for r in server.history.since(0)[1]]
    assert all(np.array_equal(a, b) for a, (b, _) in zip(arrived, values, strict=True))
    batches = server.clients[sink.id].last_batch - 1  # one of them has no records
    assert batches <= 4 if arena else batches >= 7
    queue.close()


@pytest.mark.slow
def test_uses_its_arena_again_once_the_server_has_copied_it(server, connect):
    pool = Pool(20 << 20)
    queue = connect(pool)
    assert put(queue, record("first", 0.0)).wait(60)
    for i in range(40):  # the history holds 64 MB
        array, one = large(pool, i, 8 << 20)
        assert one.value.data.segment.number == 1
        assert put(queue, one, array.nbytes).wait(60)
    del one
    assert np.array_equal(rebuild(server.history.since(0)[1][-1].value), array)
    assert pool.acquire_shared(pool.nbytes) is not None


@pytest.mark.parametrize("arena", [True, False])
def test_encrypts_small_records_only_on_their_way_to_another_host(
    server, connect, arena, monkeypatch
):
    queue = connect(arena=arena)
    assert put(queue, record("first", 0.0)).wait(60)
    sent = []
    send = queue.sink._channel.send
    monkeypatch.setattr(
        queue.sink._channel, "send", lambda frames, **k: (sent.append(frames), send(frames, **k))
    )
    content = np.full(8000, 7, np.uint8).tobytes()
    value = TensorData("numpy", "uint8", (8000,), content)
    assert put(queue, record("small", value), 8000).wait(60)
    assert rebuild(server.history.records("small")[0].value).tobytes() == content
    assert any(content in b"".join(map(bytes, frames)) for frames in sent) is not arena


@pytest.mark.parametrize("arena", [True, False])
def test_sends_more_tensors_than_a_header_can_name(server, connect, arena, monkeypatch):
    one = wire.External(1 << 62, 1 << 62, 1 << 62)
    header = wire.Batch(1 << 62, 1 << 62, 1 << 50, (one,) * live._MOST_BLOCKS)
    assert len(wire.message(wire.RECORDS, header)[1]) + 10_000 < wire.LARGEST_FRAME
    monkeypatch.setattr(live, "_MOST_BLOCKS", 2)
    pool = Pool()
    queue = connect(pool, arena=arena)
    arrays = {str(i): np.full(20_000, i, np.uint8) for i in range(5)}
    assert put(queue, record("x", snapshot(arrays, pool)[0]), 100_000).wait(60)
    arrived = rebuild(server.history.records("x")[0].value)
    assert all(np.array_equal(arrived[name], arrays[name]) for name in arrays)


def test_sends_longer_names_than_a_header_can_hold(server, connect):
    pipeline, queue = Pipeline(), connect()
    pipeline.attach(queue)
    names = [f"{i}" * 40_000 for i in range(20)]
    for name in [*names, *names]:  # the first catch takes another path
        counter = pipeline.counters.of(name)
        number = counter.tick()
        if pipeline.fast(0.5, name, number, 0, number) is None:
            pipeline.capture(0.5, counter, number)
    assert queue.flush(60)
    assert [len(server.history.records(name)) for name in names] == [2] * 20
    assert not any(queue.ledger.reasons().values())


def test_abandons_an_arena_that_a_stopped_server_may_still_read(server, connect):
    pool = Pool(20 << 20)
    queue = connect(pool)
    assert put(queue, record("first", 0.0)).wait(60)
    array, one = large(pool, 1, 8 << 20)
    assert put(queue, one, array.nbytes).wait(60)
    queue.sink._flights[99] = queue.sink._flights.get(99) or _flight(one)
    assert len(queue.sink.give_up()) == 1
    assert large(pool, 2, 8 << 20)[1].value.data.segment.number == 0
    pool.prepare()  # when it is connected again
    assert large(pool, 2, 8 << 20)[1].value.data.segment.number == 2
