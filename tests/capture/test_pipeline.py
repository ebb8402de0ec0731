"""What the pipeline notices about its own costs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tensortap.capture import pipeline as module
from tensortap.capture.memory import MemorySink
from tensortap.capture.pipeline import Pipeline
from tensortap.capture.queue import Queue


@pytest.fixture
def pipeline():
    pipeline = Pipeline()
    queue = Queue(MemorySink(1 << 28, pipeline.ledger), budget=1 << 28, name="test")
    pipeline.attach(queue)
    yield pipeline
    queue.close()


def capture_every(pipeline, seconds, monkeypatch, times=10):
    """Capture large values that each take a millisecond, one per `seconds`."""
    counter, value = pipeline.counters.of("x"), np.zeros(1 << 16)
    for i in range(times):
        start = round(i * seconds * 1e9)
        readings = itertools.chain([start], itertools.repeat(start + 1_000_000))
        monkeypatch.setattr(module, "_now", readings.__next__)
        pipeline.capture(value, counter, counter.tick())


def test_warns_once_about_values_that_take_much_of_the_time(pipeline, monkeypatch, caplog):
    capture_every(pipeline, 0.005, monkeypatch)
    capture_every(pipeline, 0.005, monkeypatch)
    [record] = caplog.records
    assert record.getMessage() == (
        "tensortap: catching 'x' (512 KiB) takes 1 ms, 20 % of the time between two of them; "
        "catch less of it, such as every=10, or a slice of the tensor"
    )


def test_values_that_overtake_each_other_take_all_of_the_time_at_most(
    pipeline, monkeypatch, caplog
):
    capture_every(pipeline, 1e-9, monkeypatch)  # of several threads, or of a signal handler
    assert "takes 1 ms, 100 % of the time" in caplog.text


def test_does_not_warn_about_values_that_take_little_of_the_time(pipeline, monkeypatch, caplog):
    capture_every(pipeline, 0.02, monkeypatch)
    assert not caplog.records


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
