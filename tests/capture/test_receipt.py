"""The receipt, as people read it and as it is stored."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tensortap.capture.ledger import Receipt, format_seconds
from tensortap.capture.pipeline import Pipeline
from tensortap.capture.queue import Queue
from tensortap.rooms.track.memory import MemorySink

REASONS = {"over budget": 3, "disconnected": 2004, "error": 5, "too large": 0}
FULL = Receipt(
    captured=12_345,
    tracked=0,
    skipped=1_000_000,
    dropped=2012,
    reasons=REASONS,
    bytes=3 << 20,
    steps=1200,
    seconds=1.5,
    seconds_per_step=0.00125,
    activities={"copy": 0.9, "select": 0.0, "small values": 0.6},
    sessions={"127.0.0.1:2875": "connected, through shared memory"},
)


def test_prints_counts_reasons_and_costs():
    assert str(FULL) == (
        "tensortap receipt: 12,345 captured (3.0 MiB), 1,000,000 skipped, "
        "2,012 dropped (3 over budget, 2,004 disconnected, 5 error)\n"
        "  training thread: 1.5 s, 1.25 ms per step over 1,200 steps\n"
        "  spent on: copy 900 ms, small values 600 ms\n"
        "  live session 127.0.0.1:2875: connected, through shared memory"
    )
    tracked = str(dataclasses.replace(FULL, tracked=7))
    assert "12,345 captured (3.0 MiB), 7 tracked, 1,000,000 skipped" in tracked


def test_prints_the_share_of_the_steps_and_the_memory():
    receipt = dataclasses.replace(FULL, stepping=60.0, memory=256 << 20)
    assert receipt.share == 0.025
    assert "per step over 1,200 steps (2.50% of their time)\n" in str(receipt)
    assert "  memory for values on their way: 256 MiB\n" in str(receipt)
    connected = {**FULL.activities, "connecting": 3.0}
    assert dataclasses.replace(receipt, seconds=4.5, activities=connected).share == 0.025
    earlier = dataclasses.replace(FULL, stepping=50.0, activities={"copy": 0.4})
    assert receipt.since(earlier).share == pytest.approx(1.1 / 10)


def test_since_subtracts_an_earlier_receipt():
    later = dataclasses.replace(
        FULL,
        captured=12_400,
        dropped=2013,
        reasons={**REASONS, "too large": 1},
        steps=1210,
        activities={"copy": 1.0, "select": 0.0, "small values": 0.6},
    )
    added = later.since(FULL)
    assert (added.captured, added.dropped, added.steps, added.skipped) == (55, 1, 10, 0)
    assert added.reasons == {"over budget": 0, "disconnected": 0, "error": 0, "too large": 1}
    assert added.seconds == pytest.approx(0.1)
    assert added.seconds_per_step == pytest.approx(0.01)
    assert added.sessions == FULL.sessions


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ns"), (3e-9, "3 ns"), (2.5e-6, "2.5 µs"), (0.0123, "12.3 ms"), (75.04, "75 s")],
)
def test_formats_durations(seconds, text):
    assert format_seconds(seconds) == text


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
