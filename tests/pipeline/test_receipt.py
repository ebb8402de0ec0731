"""The bill, as people read it."""

from __future__ import annotations

import dataclasses

import pytest

from tensortap.pipeline.receipt import Receipt, _time

FULL = Receipt(
    captured=12_345,
    tracked=0,
    skipped=1_000_000,
    dropped=3,
    unheard=2000,
    failed=4,
    errors=5,
    bytes=3 << 20,
    steps=1200,
    seconds=1.5,
    seconds_per_step=0.00125,
    where={"copy": 0.9, "select": 0.0, "small values": 0.6},
    sessions={"127.0.0.1:2875": "connected, through shared memory"},
)


def test_a_full_one():
    assert str(FULL) == (
        "tensortap receipt: 12,345 captured (3.0 MiB), 1,000,000 skipped\n"
        "  not kept: 3 dropped over budget, 2,000 with nobody listening, 4 lost on the way, "
        "5 could not be caught\n"
        "  training thread: 1.5 s in all, 1.25 ms a step over 1,200 steps\n"
        "  spent on: copy 900 ms, small values 600 ms\n"
        "  live session 127.0.0.1:2875: connected, through shared memory"
    )


def test_an_empty_one():
    empty = Receipt(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, {}, {})
    assert str(empty) == (
        "tensortap receipt: 0 captured (0 B), 0 skipped\n"
        "  not kept: nothing\n"
        "  training thread: 0 ns in all\n"
        "  spent on: nothing"
    )


def test_it_is_data():
    assert dataclasses.asdict(FULL)["dropped"] == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        FULL.captured = 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ns"), (3e-9, "3 ns"), (2.5e-6, "2.5 µs"), (0.0123, "12.3 ms"), (75.04, "75 s")],
)
def test_times(seconds, text):
    assert _time(seconds) == text
