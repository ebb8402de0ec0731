"""The sink that keeps records in this process."""

from __future__ import annotations

import pytest

from tensortap.capture.queue import Queue
from tensortap.core.history import record_nbytes
from tensortap.rooms.track.memory import MemorySink
from tests.capture.sink_contract import SinkContract, record


class TestContract(SinkContract):
    @pytest.fixture
    def queue(self):
        queue = Queue(MemorySink(), budget=8 << 20, name="test")
        yield queue
        queue.close()

    def arrived(self, queue):
        return queue.sink.records


def test_evicts_the_oldest_records_beyond_its_bound():
    sink = MemorySink(bound=3 * record_nbytes(record()))
    kept = [record("x", float(i)) for i in range(10)]
    for one in kept:
        sink.keep(one)
    assert sink.records == kept[-3:]
    assert sink.evicted == 7


def test_a_record_larger_than_the_bound_is_evicted_at_once():
    sink = MemorySink(bound=1000)
    sink.keep(record("x", "long" * 1000))
    assert sink.records == []
    assert sink.evicted == 1
