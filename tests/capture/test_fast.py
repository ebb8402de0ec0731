"""The C fast path makes the same records as `Pipeline.capture` makes in Python."""

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
from torch.overrides import TorchFunctionMode

from tensortap.capture.fast import FastCapture
from tensortap.capture.pipeline import Pipeline
from tensortap.capture.queue import Queue, entries_of
from tensortap.capture.sink import Sink


class Stopped(Sink):
    """A sink that takes nothing, so that a test can look at what was queued."""

    def __init__(self, ledger) -> None:
        self.ledger = ledger

    def room(self) -> int:
        return 0


class StoppedLive(Stopped):
    """The same for a sink that takes blocks."""

    takes_blocks = True


def stopped_pipeline(budget: int = 1 << 30, sink=Stopped) -> tuple[Pipeline, Queue]:
    pipeline = Pipeline()
    queue = Queue(sink(pipeline.ledger), budget=budget, name="test")
    pipeline.attach(queue)
    return pipeline, queue


@pytest.fixture
def queued():
    """Make pipelines that only queue."""
    made = []

    def make(budget: int = 1 << 30, sink=Stopped) -> tuple[Pipeline, Queue]:
        made.append(stopped_pipeline(budget, sink))
        return made[-1]

    yield make
    for _, queue in made:
        queue.drop_all()
        queue.close(0)


@pytest.fixture(scope="module")
def shared():
    pipeline, queue = stopped_pipeline()
    yield pipeline, queue
    queue.drop_all()
    queue.close(0)


def comparable(record):
    return msgspec.msgpack.encode(msgspec.structs.replace(record, seq=0, time_ns=0))


def both(pipeline, queue, value, name="x"):
    """Return the queue entries of the Python path, which teaches the fast path, and of that."""
    counter = pipeline.counters.of(name)
    number = counter.tick()
    pipeline.capture(value, counter, number)
    slow = queue._entries.pop()
    ticket = pipeline.fast(value, name, number, counter.step, number - counter.base)
    fast = queue._entries.pop() if ticket is not None else None
    return slow, fast


VALUES = [
    0.25, float("nan"), -0.0, 7, -(2**63), 2**63 - 1,
    np.float32(1.5), np.int8(-3), np.bool_(True), np.float64("nan"),
    np.arange(6.0).reshape(2, 3), np.zeros(()), np.zeros((0, 3)), np.array([True, False]),
    np.array([1 + 2j], np.complex64),
    torch.tensor(0.5), torch.arange(4), torch.zeros(2, 0), torch.ones(3, dtype=torch.bfloat16),
    torch.nn.Parameter(torch.ones(2)), torch.arange(6).reshape(2, 3).T, torch.tensor(1.0).double(),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{type(v).__name__}")
def test_makes_the_same_record(queued, value):
    pipeline, queue = queued()
    slow, fast = both(pipeline, queue, value)
    assert fast is not None
    assert comparable(fast[0]) == comparable(slow[0])
    assert fast[2] == slow[2]
    assert fast[0].seq == slow[0].seq + 1


def captured(pipeline, value, name="x", step=None):
    """Capture a value as `catch` does; return its ticket."""
    counter = pipeline.counters.of(name)
    number = counter.tick()
    return pipeline.fast(value, name, number, step, number) or pipeline.capture(
        value, counter, number
    )


def records_in(queue):
    """Return the queued records, those of blocks too."""
    entries = list(queue._entries)
    return [
        record
        for entry in entries
        for record, _, _ in ([entry] if isinstance(entry, tuple) else entries_of(entry))
    ]


def test_gathers_the_same_records_in_blocks(queued):
    """The values of one block: in the same order, with the same fields and counts."""
    (plain, queue), (live, blocks) = queued(), queued(sink=StoppedLive)
    for _ in range(2):  # the first round teaches the fast path
        for pipeline in (plain, live):
            for value in VALUES:
                captured(pipeline, value)
                captured(pipeline, 0.5, f"other {type(value).__name__}")
    found = records_in(blocks)
    assert [comparable(r) for r in found] == [comparable(r) for r in records_in(queue)]
    assert [r.seq for r in found] == list(range(4 * len(VALUES)))
    assert not isinstance(blocks._entries[-1], tuple), "no block"
    assert blocks.waiting == queue.waiting == 4 * len(VALUES)
    assert blocks.state.put == queue.state.put
    assert live.receipt().bytes == plain.receipt().bytes
    captured(live, 0.5)  # that block was taken, so that this is in another one
    assert len(blocks._entries[-1]) == 1


class Noting(TorchFunctionMode):
    """Notes every call of torch that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_tensors_are_read_where_no_mode_notices(queued):
    pipeline, queue = queued(sink=StoppedLive)
    complex_, real = torch.tensor([1 + 2j]), torch.arange(4.0)
    lazy = [complex_.conj(), torch._neg_view(real), complex_.conj().imag]
    with torch.inference_mode():
        inferred = torch.ones(3)
    values = [real, *lazy, inferred, torch.ones(2, requires_grad=True) * 2]
    with Noting() as mode:
        for value in 2 * values:
            captured(pipeline, value)
    for value in values:
        captured(pipeline, value)
    assert not mode.seen
    expected = [v.detach().resolve_conj().resolve_neg().numpy().tobytes() for v in 3 * values]
    assert [r.value.data for r in records_in(queue)] == expected


def test_a_block_ends_where_another_record_comes(queued):
    pipeline, queue = queued(sink=StoppedLive)
    for value in (1.0, 2.0, 3.0, "text", 4.0, 2**70, 5.0, np.zeros(9000), 6.0):
        captured(pipeline, value)
    assert [len(e) for e in queue._entries if not isinstance(e, tuple)] == [2, 1, 1, 1]
    assert [r.seq for r in records_in(queue)] == list(range(9))


@pytest.mark.parametrize("value", [0.5, np.zeros(2000), torch.zeros(64, 64)])
def test_blocks_are_bounded(queued, value):
    pipeline, queue = queued(sink=StoppedLive)
    for _ in range(3000):
        captured(pipeline, value)
    _, *blocks = queue._entries
    assert sum(map(len, blocks)) == 2999
    assert len(blocks) >= 3
    assert all(block.nbytes <= (512 << 10) + 16_384 + 1024 * 40 for block in blocks)
    for step in range(200):
        captured(pipeline, 0.5, f"name {step}")
    blocks = [block for block in queue._entries if not isinstance(block, tuple)]
    assert max(len(block.columns) for block in blocks) == 64


def test_the_latest_of_each_name_survive_in_blocks(queued):
    pipeline, queue = queued(budget=200_000, sink=StoppedLive)
    tickets = [captured(pipeline, float(n), "ab"[n % 2]) for n in range(1000)]
    kept = [r for r in records_in(queue) if r.seq < 1000]
    values = {r.name: r.value for r in kept}
    assert values == {"a": 998.0, "b": 999.0}
    receipt = pipeline.receipt()
    assert receipt.captured == len(kept) < 400
    assert receipt.captured + receipt.dropped == 1000
    assert receipt.bytes == 8 * len(kept)
    assert [ticket.failed for ticket in tickets].count(False) == len(kept)
    assert not tickets[-1].failed
    assert queue.state.put - queue.state.got == sum(8 + 512 for _ in kept)


def test_steps_beyond_64_bits_need_a_record_of_their_own(queued):
    pipeline, queue = queued(sink=StoppedLive)
    captured(pipeline, 1.0)
    for step in (1 << 70, -(1 << 63), 7):
        captured(pipeline, 1.0, step=step)
    assert [r.step for r in records_in(queue)][1:] == [1 << 70, -(1 << 63), 7]


@given(array=hnp.arrays(st.sampled_from(["f2", "f4", "f8", "i1", "u8", "?", "c16"]),
                        hnp.array_shapes(min_dims=0, min_side=0, max_side=5)))  # fmt: skip
@pytest.mark.slow
def test_makes_the_same_record_of_any_small_array(shared, array):
    pipeline, queue = shared
    slow, fast = both(pipeline, queue, array)
    assert fast is not None
    assert comparable(fast[0]) == comparable(slow[0])


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
def test_leaves_other_values_to_python(queued, value):
    pipeline, queue = queued()
    for teacher in (np.zeros(3), np.zeros(3, "u1"), torch.zeros(3), 1.0, 1):
        both(pipeline, queue, teacher)
    before = queue.state.put
    try:
        ticket = pipeline.fast(value, "x", 0, None, 0)
    except Exception as error:  # the sparse tensor: the same error as in Python
        assert "to_dense" in str(error)  # noqa: PT017
        ticket = None
    if not isinstance(value, int):
        assert ticket is None
        assert queue.state.put == before
    else:
        assert queue._entries.pop()[0].value.text == hex(value)


def test_leaves_a_full_queue_to_python(queued):
    pipeline, queue = queued(budget=2000)
    taken = [both(pipeline, queue, 1.0)]
    tickets = [pipeline.fast(1.0, "x", n, None, 0) for n in range(10)]
    fit = [ticket for ticket in tickets if ticket is not None]
    assert 0 < len(fit) < 10
    assert len(queue._entries) == len(fit)
    assert queue.state.put - queue.state.got <= 2000 + 2 * taken[0][0][2]
    assert pipeline.counters["x"].calls == 1


def test_sets_step_and_call(queued):
    pipeline, queue = queued()
    both(pipeline, queue, 1.0)
    pipeline.fast(0.5, "x", 41, None, 41)
    pipeline.fast(0.5, "x", 41, 7, 2)
    uncounted, counted = queue._entries[-2][0], queue._entries[-1][0]
    assert (uncounted.step, uncounted.call) == (41, 0)
    assert (counted.step, counted.call) == (7, 2)


@pytest.mark.parametrize("sink", [Stopped, StoppedLive])
def test_leaks_no_objects(queued, sink):
    pipeline, queue = queued(sink=sink)
    value = np.arange(4.0)
    both(pipeline, queue, value)

    def burst() -> None:
        for number in range(1000):
            pipeline.fast(value, "x", number, None, 0)
        queue._entries.clear()
        queue.state.block = None

    burst()
    gc.collect()
    references, objects = sys.getrefcount(value), sys.getallocatedblocks()
    for _ in range(5):
        burst()
    gc.collect()
    assert sys.getrefcount(value) == references
    assert sys.getallocatedblocks() - objects < 500


def test_misuse_raises_and_does_not_crash(queued):
    pipeline, _ = queued()
    with pytest.raises(TypeError):
        pipeline.fast(1.0)
    with pytest.raises(TypeError):
        FastCapture(record=1)
    with pytest.raises(TypeError):
        FastCapture()
    with pytest.raises(TypeError):
        FastCapture.__new__(FastCapture)(1.0, "x", 0, None, 0)
