"""The capture of small values in C does exactly what `Session.capture` does in Python."""

from __future__ import annotations

import gc
import sys

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tensortap.pipeline import fast as meter
from tensortap.pipeline.pipeline import Pipeline
from tensortap.pipeline.queue import Background, Wake
from tensortap.wire.address import parse_address


class Stopped:
    """A drain that takes nothing, so that what was queued can be looked at."""

    accepting = True
    pending = 0

    def room(self) -> int:
        return 0

    def send(self, entries) -> None:
        raise AssertionError("there is no room")

    def wait(self, wake: Wake, timeout: float) -> None:
        wake.wait(timeout)

    def give_up(self):
        return []

    def hurry(self) -> None: ...

    def close(self) -> None: ...

    def describe(self) -> str:
        return "stopped"


@pytest.fixture
def queued():
    """A session that queues, and its queue."""
    made = []

    def make(budget: int = 1 << 30) -> tuple[Pipeline, Background]:
        pipeline = Pipeline()
        sink = Background(Stopped(), budget=budget, name="test")
        address = parse_address("127.0.0.1:1")
        pipeline._lives[address] = sink
        pipeline._default = address
        pipeline._refresh()
        made.append(sink)
        return pipeline, sink

    yield make
    for sink in made:
        sink.forget()
        sink.close(0)


@pytest.fixture(scope="module")
def shared():
    pipeline = Pipeline()
    sink = Background(Stopped(), budget=1 << 30, name="test")
    address = parse_address("127.0.0.1:1")
    pipeline._lives[address] = sink
    pipeline._default = address
    pipeline._refresh()
    yield pipeline, sink
    sink.forget()
    sink.close(0)


def plainly(record):
    return msgspec.structs.replace(record, seq=0, time_ns=0)


def both(pipeline, sink, value, name="x"):
    """The record of a value the slow way (which teaches the fast one), and the fast way."""
    gate = pipeline.gates[name]
    number = gate.tick()
    pipeline.capture(value, gate, number)
    slow = sink._queue.pop()
    ticket = pipeline.hot(value, name, number, gate.step, number - gate.base)
    fast = sink._queue.pop() if ticket is not None else None
    return slow, fast


def test_the_extension_is_built_here():
    assert meter.Hot is not None


VALUES = [
    0.25, float("nan"), -0.0, 7, -(2**63), 2**63 - 1,
    np.float32(1.5), np.int8(-3), np.bool_(True), np.float64("nan"),
    np.arange(6.0).reshape(2, 3), np.zeros(()), np.zeros((0, 3)), np.array([True, False]),
    np.array([1 + 2j], np.complex64),
    torch.tensor(0.5), torch.arange(4), torch.zeros(2, 0), torch.ones(3, dtype=torch.bfloat16),
    torch.nn.Parameter(torch.ones(2)), torch.arange(6).reshape(2, 3).T, torch.tensor(1.0).double(),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{type(v).__name__}")
def test_the_same_record_either_way(queued, value):
    pipeline, sink = queued()
    slow, fast = both(pipeline, sink, value)
    assert fast is not None
    assert msgspec.msgpack.encode(plainly(fast[0])) == msgspec.msgpack.encode(plainly(slow[0]))
    assert fast[2] == slow[2]
    assert fast[0].seq == slow[0].seq + 1


@given(array=hnp.arrays(st.sampled_from(["f2", "f4", "f8", "i1", "u8", "?", "c16"]),
                        hnp.array_shapes(min_dims=0, min_side=0, max_side=5)))  # fmt: skip
def test_any_small_array_either_way(shared, array):
    pipeline, sink = shared
    slow, fast = both(pipeline, sink, array)
    assert fast is not None
    assert msgspec.msgpack.encode(plainly(fast[0])) == msgspec.msgpack.encode(plainly(slow[0]))


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(20_000, np.uint8),  # large
        np.zeros((4, 4))[:, ::2],  # strided
        np.zeros(3, "datetime64[s]"),  # no buffer of it
        {"a": 1},
        "text",
        torch.zeros(20_000, dtype=torch.uint8),
        torch.zeros(3).to_sparse(),
        2**64,
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_is_not_common_is_left_to_python(queued, value):
    pipeline, sink = queued()
    for teacher in (np.zeros(3), np.zeros(3, "u1"), torch.zeros(3), 1.0, 1):
        both(pipeline, sink, teacher)
    gate, before = pipeline.gates["x"], sink.meter.put
    try:
        ticket = pipeline.hot(value, "x", 0, gate.step, 0)
    except Exception as error:  # the sparse one: said as Python says it
        assert "to_dense" in str(error)  # noqa: PT017
        ticket = None
    if not isinstance(value, int):
        assert ticket is None
        assert sink.meter.put == before
    else:
        assert sink._queue.pop()[0].value.text == hex(value)


def test_a_queue_over_its_budget_is_left_to_python(queued):
    pipeline, sink = queued(budget=2000)
    taken = [both(pipeline, sink, 1.0)]
    gate = pipeline.gates["x"]
    tickets = [pipeline.hot(1.0, "x", n, None, 0) for n in range(10)]
    fit = [ticket for ticket in tickets if ticket is not None]
    assert 0 < len(fit) < 10
    assert len(sink._queue) == len(fit)
    assert sink.meter.put - sink.meter.got <= 2000 + 2 * taken[0][0][2]
    assert gate.calls == 1


def test_it_counts_what_it_does(queued):
    pipeline, sink = queued()
    both(pipeline, sink, 1.0)
    before = pipeline.receipt()
    for number in range(100):
        pipeline.hot(0.5, "x", number, None, 0)
    after = pipeline.receipt()
    assert after.captured - before.captured == 100
    assert after.bytes - before.bytes == 800
    assert after.seconds > before.seconds


def test_it_rings_a_sleeping_thread(queued):
    pipeline, sink = queued()
    both(pipeline, sink, 1.0)
    sink.meter.asleep = True
    pipeline.hot(0.5, "x", 0, None, 0)
    assert not sink.meter.asleep


def test_steps_and_calls(queued):
    pipeline, sink = queued()
    both(pipeline, sink, 1.0)
    pipeline.hot(0.5, "x", 41, None, 41)
    pipeline.hot(0.5, "x", 41, 7, 2)
    uncounted, counted = sink._queue[-2][0], sink._queue[-1][0]
    assert (uncounted.step, uncounted.call) == (41, 0)
    assert (counted.step, counted.call) == (7, 2)


def test_nothing_leaks(queued):
    pipeline, sink = queued()
    value = np.arange(4.0)
    both(pipeline, sink, value)

    def burst() -> None:
        for number in range(1000):
            pipeline.hot(value, "x", number, None, 0)
        sink._queue.clear()

    burst()
    gc.collect()
    references, objects = sys.getrefcount(value), sys.getallocatedblocks()
    for _ in range(5):
        burst()
    gc.collect()
    assert sys.getrefcount(value) == references
    assert sys.getallocatedblocks() - objects < 500


def test_misuse_is_an_error_and_no_crash(queued):
    pipeline, _ = queued()
    with pytest.raises(TypeError):
        pipeline.hot(1.0)
    with pytest.raises(TypeError):
        meter.Hot(record=1)
    with pytest.raises(TypeError):
        meter.Hot()
    with pytest.raises(TypeError):
        meter.Hot.__new__(meter.Hot)(1.0, "x", 0, None, 0)
