"""The sink that keeps records in this process."""

from __future__ import annotations

import pytest

from tensortap.history import History
from tensortap.sinks.memory import Memory
from tests.sinks.contract import SinkContract


class TestMemory(SinkContract):
    @pytest.fixture
    def sink(self):
        return Memory(History(8 << 20))

    def arrived(self, sink):
        held = [r for name in sink.history.names() for r in sink.history.records(name)]
        return sorted(held, key=lambda r: r.seq)

    def test_a_value_larger_than_the_memory_is_not_admitted(self, sink):
        assert sink.admit(8 << 20)
        assert not sink.admit((8 << 20) + 1)
