"""Signal handlers and finalizers may catch values while their own thread is inside tensortap.

Nothing hangs, nothing raises, and every value is delivered or counted as dropped.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import tensortap
import tensortap as tap
from tensortap.api import session
from tensortap.capture.pipeline import Pipeline
from tensortap.capture.queue import Queue
from tensortap.core.busy import is_busy
from tensortap.rooms.track.memory import MemorySink
from tests.capture.test_fast import Stopped

SOURCE = str(Path(tensortap.__file__).parent)
LARGE = np.ones(8192)  # more than is copied without the pool


class Interrupted:
    """Calls a function at every `stride`-th line of this thread inside tensortap.

    There signals and garbage collections can strike, also while a lock is held.
    """

    def __init__(self, handler, stride) -> None:
        self.handler = handler
        self.stride = stride
        self.lines = 0
        self._handling = False

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        self.lines += not self._handling
        if not self._handling and self.lines % self.stride == 0:
            self._handling = True
            try:
                self.handler()
            finally:
                self._handling = False
        return self._trace


def capture(pipeline, value, name, **options):
    counter = pipeline.counters.of(name)
    return pipeline.capture(value, counter, counter.tick(), **options)


def finishes(work, seconds=100):
    """Run in a thread, so that a deadlock fails the test instead of hanging it."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "deadlock"


def check_counts(pipeline):
    """Check that each call was captured or dropped, and none failed; return the receipt."""
    receipt = pipeline.receipt()
    calls = sum(counter.calls for counter in pipeline.counters.values())
    assert (receipt.captured + receipt.dropped, receipt.reasons["error"]) == (calls, 0)
    return receipt


@pytest.mark.parametrize("overflow", ["latest", "newest", "block"])
def test_a_handler_captures_at_any_line_of_a_capture(overflow):
    pipeline = Pipeline()
    sink = MemorySink(1 << 20, pipeline.ledger)
    queue = Queue(sink, budget=1 << 20, overflow=overflow, name="test")
    pipeline.attach(queue)

    def work():
        for stride in (2, 3, 5, 7, 11):  # in the end every line
            with Interrupted(lambda: capture(pipeline, LARGE, "handler"), stride):
                capture(pipeline, LARGE + stride, "large", changed=True)
                capture(pipeline, {"a": LARGE}, "dict", when=lambda value: True)
                pipeline.advance("test")
                pipeline.refresh()

    finishes(work)
    assert queue.flush(60)
    queue.close()
    receipt = check_counts(pipeline)
    assert receipt.captured > 10
    assert receipt.reasons["busy"] > 10


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
    receipt = check_counts(pipeline)
    assert receipt.reasons["over budget"] > 50
    assert receipt.reasons["busy"] > 50


@pytest.mark.parametrize(
    ("overflow", "budget"), [("latest", 1 << 20), ("latest", 200_000), ("block", 200_000)]
)
def test_an_exception_of_a_handler_loses_no_lock_and_no_room(overflow, budget):
    """Ctrl-C may strike anywhere, also while the queue drops older values or waits."""
    pipeline = Pipeline()
    sink = MemorySink(1 << 20, pipeline.ledger)
    queue = Queue(sink, budget=budget, overflow=overflow, name="test")
    pipeline.attach(queue)
    capture(pipeline, LARGE, "first")  # imports modules, whose locks are not ours

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # Hypothesis has a callback there, and Python ignores what that raises
    try:
        for i in range(1000):
            with contextlib.suppress(KeyboardInterrupt):
                # again, because Python ignores what a finalizer raises
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + i * 1e-6, 1.0)
                while True:
                    capture(pipeline, LARGE, f"interrupted {i % 5}")
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            assert not is_busy()
    finally:
        gc.enable()
        signal.signal(signal.SIGALRM, before)
    assert queue.flush(60)  # else the last of five names may still fill it
    arrived = []
    finishes(lambda: arrived.append(capture(pipeline, LARGE, "another thread").wait(60)))
    assert arrived == [True]
    assert queue.flush(60)
    assert queue.state.put == queue.state.got
    queue.close()


@pytest.mark.parametrize("method", [False, True])
def test_an_error_of_a_handler_reaches_the_program(method, tmp_path):
    """A timeout of the program that strikes inside tensortap is not taken for its own error."""

    class Job:
        def late(self, *_):
            raise TimeoutError("of the program")

    def strike(*_):
        os.kill(os.getpid(), signal.SIGALRM)
        return True

    def fails(*_):
        raise TimeoutError("of a rule")

    net = torch.nn.Linear(4, 4)
    before = signal.signal(
        signal.SIGALRM, Job().late if method else functools.partial(Job.late, None)
    )
    try:
        with pytest.raises(TimeoutError), tap.track(net, alerts=[strike], only_training=False):
            net(torch.ones(2, 4))
        with tap.track(net, alerts=[fails], only_training=False):
            net(torch.ones(2, 4))
        tap.init(tmp_path)
        with pytest.raises(TimeoutError):
            tap.catch(LARGE, "x", when=strike)
    finally:
        tap.finish()
        signal.signal(signal.SIGALRM, before)


PROGRAM = """
import gc, json, signal, sys
import numpy as np
import tensortap as tap
values = [np.ones(1), np.ones(2500), np.ones(1 << 17), 0.5, {"a": [np.ones(3000)]}]
numbers = {"handler": 0, "finalizer": 0, "main": 0}

def take(who):
    i = numbers[who]
    numbers[who] += 1
    if i % 5:
        tap.catch(values[i % len(values)], f"{who} {i % len(values)}", changed=i % 3 == 0)
    else:
        tap.catch(values[i % len(values)])

class Garbage:
    def __init__(self):
        self.itself = self

    def __del__(self):
        take("finalizer")

def handler(*_):
    Garbage()
    take("handler")
    if numbers["handler"] < 400:
        signal.setitimer(signal.ITIMER_REAL, 0.001)  # only now: it may take longer than that

signal.signal(signal.SIGALRM, handler)
gc.set_threshold(20)
signal.setitimer(signal.ITIMER_REAL, 0.001)
if sys.argv[1:]:
    tap.init(sys.argv[1])
while numbers["handler"] < 400:
    take("main")
gc.collect()
flushed, receipt = tap.flush(60), tap.receipt()
tap.finish()
print(json.dumps([flushed, receipt.captured, receipt.skipped, receipt.reasons, numbers]))
"""


@pytest.mark.slow
@pytest.mark.fault("signals and finalizers from the first capture on")
@pytest.mark.parametrize("way", ["live", "run"])
def test_handlers_and_finalizers_catch_from_the_first_capture_on(way, tmp_path):
    server = session.start("127.0.0.1", 0, "256MB")
    where = str(server.address) if way == "live" else "127.0.0.1:1"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), *([str(tmp_path / "runs")] if way == "run" else [])]
    environment = {**os.environ, "TENSORTAP_SERVER": where}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "Exception" not in done.stderr
        flushed, captured, skipped, reasons, numbers = json.loads(done.stdout)
        assert flushed
        assert numbers["finalizer"] > 50
        assert captured + skipped + sum(reasons.values()) == sum(numbers.values())
        assert captured > numbers["main"] // 10
        if way == "live":
            assert captured == server.history.written
    finally:
        server.close()
