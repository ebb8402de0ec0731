"""Signal handlers and finalizers may capture values while tensortap holds any of its locks.

A trace function calls the handler before lines inside tensortap: there signals and garbage
collections can strike, also while a lock is held.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import tensortap
from tensortap import buffers, locks
from tensortap.api import session
from tensortap.buffers import Pool
from tensortap.locks import Latch, Notifier, SafeLock
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


def finishes(work, seconds=200):
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
    assert queue.flush(60)
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
        if any(thread.is_alive() for thread in threads):  # only now: it may have taken longer
            signal.setitimer(signal.ITIMER_REAL, 0.001)

    def work():
        for i in range(1000):
            Garbage()
            capture(pipeline, LARGE, f"thread {i % 5}")

    before, threshold = signal.signal(signal.SIGALRM, handler), gc.get_threshold()
    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    gc.set_threshold(50)
    try:
        for thread in threads:
            thread.start()
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        deadline = time.monotonic() + 200
        i = 0
        while any(thread.is_alive() for thread in threads):
            capture(pipeline, LARGE, f"main {(i := i + 1) % 7}")
            assert time.monotonic() < deadline, "deadlock"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.set_threshold(*threshold)
    assert len(caught) > 5
    assert queue.flush(60)
    queue.close()
    receipt = pipeline.receipt()
    calls = sum(counter.calls for counter in pipeline.counters.values())
    assert (receipt.captured + receipt.dropped, receipt.reasons["error"]) == (calls, 0)


FIRST = """
import contextlib, gc, json, signal, sys
way, folder = sys.argv[1:]
live = way.startswith("live")
import numpy as np
import tensortap as tap
values = [np.ones(1), np.ones(2500), np.ones(1 << 17), 0.5, {"a": [np.ones(3000)]}]
if way != "live":
    import torch
    values += [torch.ones(1), torch.ones(5000), torch.ones(1 << 18), torch.ones(3).bfloat16()]
    model = torch.nn.Linear(2, 2)
numbers = {"handler": 0, "finalizer": 0, "main": 0}
stop = False

def take(who):
    i = numbers[who]
    numbers[who] += 1
    value = values[i % len(values)]
    if i % 5:
        tap.catch(value, f"{who} {i % len(values)}", changed=i % 3 == 0)
    else:
        tap.catch(value)

def forward():
    batch = torch.ones(1, 2)
    model(batch)

class Garbage:
    def __init__(self):
        self.itself = self

    def __del__(self):
        stop or take("finalizer")

def handler(*_):
    Garbage()
    take("handler")
    if numbers["handler"] % 7 == 0:
        signal.raise_signal(signal.SIGALRM)  # within this one
    if way == "hooks":
        forward()
    stop or signal.setitimer(signal.ITIMER_REAL, 0.005)  # only now: it may take longer than that

signal.signal(signal.SIGALRM, handler)
gc.set_threshold(20)
signal.setitimer(signal.ITIMER_REAL, 0.005)
with contextlib.ExitStack() as stack:
    if not live:
        path = tap.init(folder)
    if way == "hooks":
        stack.enter_context(tap.watch(model, on_record=id, rate=None, start_method="fork"))
        stack.enter_context(tap.track(model))
        stack.enter_context(tap.trace(forward, ["batch"]))
    while numbers["main"] < 200 or min(numbers.values()) < 30:
        take("main")
        if way == "hooks":
            forward()
    stop = True
    signal.setitimer(signal.ITIMER_REAL, 0)
flushed, receipt = tap.flush(60), tap.receipt()
tap.finish()
stored = [] if live else [r for r in tap.open(path).records() if r.kind == tap.Kind.VALUE]
counts = receipt.captured, receipt.skipped, receipt.reasons, numbers, len(stored)
print(json.dumps([flushed, *counts]))
"""


@pytest.mark.slow
@pytest.mark.fault("signals and finalizers during the first capture")
@pytest.mark.parametrize("way", ["live", "live with torch", "run", "hooks"])
def test_handlers_and_finalizers_capture_before_the_first_capture_is_prepared(way, tmp_path):
    """Nothing is lost while modules are imported and queues, threads and workers are started."""
    server = session.start("127.0.0.1", 0, "256MB")
    program = tmp_path / "program.py"  # a file: functions are traced by their source
    program.write_text(FIRST)
    live = way.startswith("live")
    where = str(server.address) if live else "127.0.0.1:1"
    environment = {**os.environ, "TENSORTAP_SERVER": where}
    command = [sys.executable, str(program), way, str(tmp_path / "runs")]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "Error" not in done.stderr
        assert "Exception" not in done.stderr
        flushed, captured, skipped, reasons, numbers, stored = json.loads(done.stdout)
        assert flushed
        assert min(numbers.values()) > 10
        unheard = reasons.pop("disconnected")  # before there was a run
        assert not any(reasons.values())
        if live:
            assert not unheard
        if way != "hooks":  # these capture as well
            assert captured == (server.history.written if live else stored)
            assert captured + skipped + unheard == sum(numbers.values())
    finally:
        server.close()


def test_a_full_stack_leaves_locks_and_memory_as_they_were():
    pipeline = Pipeline()
    queue = Queue(MemorySink(1 << 20, pipeline.ledger), budget=1 << 20, name="test")
    pipeline.attach(queue)
    capture(pipeline, LARGE, "first")
    depths = []

    def descend():
        try:
            descend()
        except RecursionError:
            with contextlib.suppress(RecursionError):  # one frame more is free at every return
                capture(pipeline, LARGE, "deep")
                depths.append(1)
            raise

    for _ in range(3):
        with pytest.raises(RecursionError):
            descend()
    assert len(depths) > 500
    finishes(lambda: capture(pipeline, LARGE, "another thread"))
    assert queue.flush(60)
    assert pipeline.pool._lock._owner is None
    queue.close()
    queue.sink._records.clear()
    pipeline.pool._reclaimed = 0.0
    pipeline.pool.tidy()
    assert pipeline.pool._private.leased == 0


def test_a_safe_lock_ends_with_the_frame_that_has_it():
    lock, results = SafeLock(), []

    def interrupted():
        assert lock.acquire()
        raise KeyboardInterrupt

    for _ in range(2):  # it was a frame of this thread, then of another one
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        finishes(lambda: results.append(lock.acquire()))
    assert results == [True, True]
    assert lock.acquire()
    lock.release()


def test_the_pool_finds_blocks_that_an_exception_has_lost(monkeypatch):
    pool = Pool(1 << 20, shared=False)
    held = pool.acquire(1 << 19)
    with monkeypatch.context() as patch:
        patch.setattr(buffers, "Lease", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.acquire(1 << 19)
    assert pool._private._allocate(1 << 19) is None
    pool._reclaimed = 0.0
    pool.tidy()
    assert pool.acquire(1 << 19).segment is held.segment


def interrupt(*_):
    raise KeyboardInterrupt


def test_no_handler_runs_while_a_thread_waits_for_preparations():
    handled, done, results = [], threading.Event(), []
    main = threading.get_ident()

    def handler(*_):
        handled.append(len(results))
        locks.prepare(lambda: None)

    def work():
        while sys._current_frames()[main].f_code is not Latch.wait.__code__:
            done.wait(0.01)
        done.wait(0.1)  # before it waits, a handler may run
        signal.raise_signal(signal.SIGUSR1)  # another thread: only a note for the main one
        done.wait(0.1)
        results.append(1)
        return threading.current_thread()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        thread = locks.prepare(work)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert thread is not threading.current_thread()
    assert handled == [1]
    with pytest.raises(ZeroDivisionError):
        locks.prepare(lambda: 1 / 0)


def test_latch_is_given_up_after_a_while():
    latch = Latch()
    assert not latch.wait(0.01)
    latch.open()
    assert latch.wait(0)


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
        thread.join(60)
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
    assert notifier.wait_for(lambda: bool(done), 60)
    thread.join()
    assert notifier.waiting == 0
