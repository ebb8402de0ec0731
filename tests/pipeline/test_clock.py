"""The clock: one source owns it, and no step is lost."""

from __future__ import annotations

import threading

from tensortap.pipeline.clock import Clock


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


def test_starts_at_any_step():
    clock = Clock()
    assert clock.advance("a", 0)
    assert clock.step == 0
    assert clock.advance("a")
    assert clock.step == 1


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

    def work():
        for _ in range(1000):
            clock.advance("a")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.step == 8000
