"""Signal handlers and finalizers may capture values while tensortap holds any of its locks.

A trace function calls the handler before lines inside tensortap: there signals and garbage
collections can strike, also while a lock is held.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import tensortap
from tensortap.buffers import Pool
from tensortap.locks import Notifier, SafeLock
from tensortap.pipeline.pipeline import Pipeline
from tensortap.pipeline.queue import Queue
from tensortap.sinks.memory import MemorySink
from tests.pipeline.test_fast import Stopped

SOURCE = str(Path(tensortap.__file__).parent)
LARGE = np.ones(8192)  # more than is copied without the pool


class Interrupted:
    """Captures a value at every `stride`-th line of this thread inside tensortap."""

    def __init__(self, capture, stride) -> None:
        self.capture = capture
        self.stride = stride
        self.lines = 0
        self._busy = False

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        self.lines += not self._busy
        if not self._busy and self.lines % self.stride == 0:
            self._busy = True
            try:
                self.capture()
            finally:
                self._busy = False
        return self._trace


def capture(pipeline, value, name, **options):
    counter = pipeline.counters.of(name)
    return pipeline.capture(value, counter, counter.tick(), **options)


def finishes(work, seconds=60):
    """Run in a thread, so that a deadlock fails the test instead of hanging it."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "deadlock"


@pytest.mark.parametrize("overflow", ["latest", "newest", "block"])
def test_a_handler_captures_at_any_line_of_a_capture(overflow):
    pipeline = Pipeline()
    sink = MemorySink(1 << 20, pipeline.ledger)
    queue = Queue(sink, budget=1 << 20, overflow=overflow, name="test")
    pipeline.attach(queue)

    def work():
        for stride in (3, 5, 7, 11):  # in the end every line
            with Interrupted(lambda: capture(pipeline, LARGE, "handler"), stride):
                capture(pipeline, LARGE + stride, "large", changed=True)
                capture(pipeline, {"a": LARGE}, "dict", when=lambda value: True)
                pipeline.advance("test")
                pipeline.refresh()

    finishes(work)
    assert queue.flush(30)
    queue.close()
    receipt = pipeline.receipt()
    calls = sum(counter.calls for counter in pipeline.counters.values())
    assert calls > 100
    assert receipt.reasons["error"] == 0
    assert receipt.captured + receipt.dropped == calls


def test_a_handler_captures_at_any_line_while_the_queue_is_full():
    pipeline = Pipeline()
    queue = Queue(Stopped(pipeline.ledger), budget=200_000, name="test")
    pipeline.attach(queue)

    def work():
        for stride in (3, 5, 7, 11):
            with Interrupted(lambda: capture(pipeline, LARGE, "handler"), stride):
                for i in range(4):
                    capture(pipeline, LARGE, f"large {i}")
                queue.drop_all()
        pipeline.detach(queue)

    finishes(work)
    queue.close(0)
    assert pipeline.receipt().reasons["over budget"] > 50


@pytest.mark.slow
def test_real_signals_and_finalizers_while_threads_capture():
    pipeline = Pipeline()
    queue = Queue(MemorySink(1 << 20, pipeline.ledger), budget=1 << 20, name="test")
    pipeline.attach(queue)
    caught = []

    class Garbage:
        def __init__(self):
            self.itself = self

        def __del__(self):
            capture(pipeline, LARGE, "finalizer")

    def handler(*_):
        caught.append(capture(pipeline, LARGE, "handler"))

    def work():
        for i in range(1000):
            Garbage()
            capture(pipeline, LARGE, f"thread {i % 5}")

    before, threshold = signal.signal(signal.SIGALRM, handler), gc.get_threshold()
    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    gc.set_threshold(50)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        i = 0
        while any(thread.is_alive() for thread in threads):
            capture(pipeline, LARGE, f"main {(i := i + 1) % 7}")
            assert time.monotonic() < deadline, "deadlock"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.set_threshold(*threshold)
    assert len(caught) > 5
    assert queue.flush(30)
    queue.close()
    receipt = pipeline.receipt()
    calls = sum(counter.calls for counter in pipeline.counters.values())
    assert (receipt.captured + receipt.dropped, receipt.reasons["error"]) == (calls, 0)


def test_safe_lock_is_refused_to_the_thread_that_has_it():
    lock = SafeLock()
    assert lock.acquire()
    assert not lock.acquire()
    lock.release()
    assert lock.acquire()
    lock.release()


@pytest.mark.slow
def test_safe_lock_gives_up_waiting_for_another_thread():
    first, second = SafeLock(), SafeLock()
    results = []

    barrier = threading.Barrier(2)

    def work(mine, other):
        assert mine.acquire()
        barrier.wait()
        results.append(other.acquire())
        barrier.wait()

    threads = [
        threading.Thread(target=work, args=order) for order in ((first, second), (second, first))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert results == [False, False]


def test_an_interrupted_pool_lends_private_memory():
    pool = Pool()
    assert pool._lock.acquire()
    try:
        lease = pool.acquire(100_000)
    finally:
        pool._lock.release()
    lease.writable[:] = b"x" * 100_000
    assert bytes(lease.view) == b"x" * 100_000
    assert (lease.segment.fd, pool.taken) == (-1, 102_400)
    del lease
    assert not pool._returned
    assert pool.taken == 0


def test_notifier_waits_for_a_condition():
    notifier, done = Notifier(), []
    assert not notifier.wait_for(lambda: bool(done), 0.01)
    thread = threading.Thread(target=lambda: (done.append(1), notifier.notify()))
    thread.start()
    assert notifier.wait_for(lambda: bool(done), 10)
    thread.join()
    assert notifier.waiting == 0
