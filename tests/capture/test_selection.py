"""The clock and the call counters, shared between threads."""

from __future__ import annotations

import threading

from tensortap.capture.selection import CallCounter, CallCounters, Clock
from tests.processes import in_threads


def test_every_call_gets_its_own_number():
    counter = CallCounter("x")
    seen: list[int] = []

    def work(_):
        seen.extend([counter.tick() for _ in range(10_000)])

    in_threads(work, range(8))
    assert sorted(seen) == list(range(80_000))
    assert counter.calls == 80_000
    assert counter.calls == 80_000, "reading must not count"


def test_a_name_has_one_counter_whichever_thread_asks_first():
    for _ in range(50):
        counters = CallCounters()
        found: list[CallCounter] = []
        barrier = threading.Barrier(8)

        def work(_, counters=counters, found=found, barrier=barrier):
            barrier.wait()
            found.append(counters.of("x"))

        in_threads(work, range(8))
        assert len({id(counter) for counter in found}) == 1


def test_counts_calls_within_a_step():
    counter = CallCounter("x")
    assert [counter.count(None) for _ in range(3)] == [(0, 0), (1, 0), (2, 0)]
    assert [counter.count(7) for _ in range(2)] == [(7, 0), (7, 1)]
    assert counter.count(8) == (8, 0)
    counter.restart()
    assert counter.count(None) == (0, 0)
    assert counter.calls == 7


def test_differs_from_the_last_captured_digest():
    counter = CallCounter("x")
    assert counter.differs(b"1")
    assert not counter.differs(b"1")
    assert counter.differs(b"2")
    assert counter.differs(b"1")


def test_one_of_many_threads_captures_equal_content():
    counter = CallCounter("x")
    captured = []

    def work(_):
        captured.extend([i for i in range(200) if counter.differs(b"same")])

    in_threads(work, range(8))
    assert len(captured) == 1


def test_first_source_to_advance_owns_the_clock():
    clock = Clock()
    assert clock.step is None
    assert clock.advance("tap.step()")
    assert clock.step == 1
    assert not clock.advance("tracker")
    assert clock.step == 1
    assert clock.advance("tap.step()", 40)
    assert clock.advance("tap.step()")
    assert clock.step == 41
    clock.release("tracker")
    assert not clock.advance("tracker")
    clock.release("tap.step()")
    assert clock.advance("tracker")
    assert (clock.step, clock.owner) == (42, "tracker")


def test_counts_steps_whatever_their_numbers():
    clock = Clock()
    for step in (100, 101, 105, 3, None):
        clock.advance("a", step)
    assert clock.steps == 6


def test_begin_and_let_go_respect_the_owner():
    clock = Clock()
    clock.begin(7)
    assert clock.step == 7
    clock.let_go()
    assert clock.step is None
    clock.advance("a", 3)
    clock.begin(7)
    clock.let_go()
    assert clock.step == 3


def test_loses_no_step_between_threads():
    clock = Clock()

    def work(_):
        for _ in range(1000):
            clock.advance("a")

    in_threads(work, range(8))
    assert clock.step == 8000
