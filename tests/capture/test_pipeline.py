"""What the pipeline notices about its own costs."""

from __future__ import annotations

import numpy as np
import pytest

from tensortap.capture.pipeline import Pipeline
from tensortap.capture.queue import Queue
from tensortap.rooms.track.memory import MemorySink


@pytest.fixture
def pipeline():
    pipeline = Pipeline()
    queue = Queue(MemorySink(1 << 28, pipeline.ledger), budget=1 << 28, name="test")
    pipeline.attach(queue)
    yield pipeline
    queue.close()


def test_receipt_has_the_share_of_the_steps_and_the_memory(pipeline):
    assert pipeline.receipt().share == 0
    for _ in range(4):
        pipeline.advance("test")
        counter = pipeline.counters.of("x")
        pipeline.capture(np.zeros(1 << 16), counter, counter.tick())
    pipeline.advance("test")
    receipt = pipeline.receipt()
    assert 0 < receipt.share <= 1
    assert receipt.share == min(1.0, receipt.seconds / receipt.stepping)
    assert receipt.memory == pipeline.pool.taken > 0
