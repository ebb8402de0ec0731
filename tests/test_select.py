"""Counters that threads share, and the clock that one source owns."""

from __future__ import annotations

import threading

import pytest

from tensortap.select import Clock, Gate, Gates


def in_threads(work, count=8):
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_every_call_has_a_number_of_its_own():
    gate = Gate("x")
    seen: list[int] = []

    def work():
        seen.extend([gate.tick() for _ in range(10_000)])

    in_threads(work)
    assert sorted(seen) == list(range(80_000))
    assert gate.calls == 80_000
    assert gate.calls == 80_000, "looking must not count"


def test_a_name_has_one_gate_whoever_asks_first():
    for _ in range(50):
        gates = Gates()
        found: list[Gate] = []
        barrier = threading.Barrier(8)

        def work(gates=gates, found=found, barrier=barrier):
            barrier.wait()
            found.append(gates["x"])

        in_threads(work)
        assert len({id(gate) for gate in found}) == 1


@pytest.mark.parametrize("name", [3, None, 1.5, b"x"])
def test_names_are_strings(name):
    with pytest.raises(TypeError, match="a name is a string, not"):
        Gates()[name]


def test_a_name_is_not_empty():
    with pytest.raises(ValueError, match="at least one character"):
        Gates()[""]


def test_content_that_is_kept_once():
    gate = Gate("x")
    assert gate.differs(b"1")
    assert not gate.differs(b"1")
    assert gate.differs(b"2")
    assert gate.differs(b"1")


def test_of_equal_contents_in_many_threads_one_is_kept():
    gate = Gate("x")
    kept = []

    def work():
        kept.extend([i for i in range(200) if gate.differs(b"same")])

    in_threads(work)
    assert len(kept) == 1


def test_a_step_begins_with_the_call_that_sees_it_first():
    gate = Gate("x")
    gate.begin(5, 2)
    assert (gate.step, gate.base) == (2, 5)


def test_whoever_advances_the_clock_first_owns_it():
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


def test_the_clock_can_start_anywhere():
    clock = Clock()
    assert clock.advance("a", 0)
    assert clock.step == 0
    assert clock.advance("a")
    assert clock.step == 1


def test_the_clock_loses_no_step():
    clock = Clock()

    def work():
        for _ in range(1000):
            clock.advance("a")

    in_threads(work)
    assert clock.step == 8000
