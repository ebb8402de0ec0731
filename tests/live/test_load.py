"""A session with many producers, some in trouble; `make bench ARGS=load` does it for long."""

from __future__ import annotations

import pytest

from bench.load import Load, measure


@pytest.mark.fault("SIGSTOP, kill -9 and a slow connection among many producers")
def test_producers_in_trouble_disturb_nobody_else():
    assert any(no_catch_waits_for_the_session() for _ in range(4))


def no_catch_waits_for_the_session() -> bool:
    """Check a load; return False if a catch took long, as it may once on a busy machine."""
    found = measure(Load(processes=4, producers=3, seconds=2, bound=16 << 20, stop=1.5))
    assert found.confirmed > 10
    assert found.confirmed_slow > 0
    assert found.lost == 0
    assert found.dropped == 0  # by those that had no trouble of their own
    assert found.held < 20 * found.bound
    assert found.get_times
    return found.longest_stopped < found.stop / 2
