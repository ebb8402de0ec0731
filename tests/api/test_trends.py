"""How a name has gone of late."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from tensortap import frameworks as arrays
from tensortap.api import trends
from tensortap.buffers import Pool
from tensortap.record import Kind, Record
from tensortap.stats import summarize_array


def record(number: int, value=None, stats=None) -> Record:
    shape = getattr(value, "shape", ())
    neutral, _ = arrays.snapshot(value, Pool())
    return Record("x", Kind.VALUE, number, 0, number, 0, 1, number * 10**9, shape=shape,
                  value=neutral, stats=stats)  # fmt: skip


def test_one_number_a_record():
    tensor = np.array([3.0, -4.0], np.float32)
    assert trends.number_of(record(0, 7)) == 7.0
    assert trends.number_of(record(0, tensor)) == math.sqrt(12.5)
    assert trends.number_of(record(0, None, summarize_array(tensor))) == math.sqrt(12.5)
    assert trends.number_of(record(0, np.array(-2.0))) == -2.0
    assert math.isnan(trends.number_of(record(0, np.array([1.0, np.nan]))))
    assert math.isnan(trends.number_of(record(0, None, summarize_array(np.array([np.inf])))))


def test_what_has_no_number():
    for value in ("words", np.zeros(0), np.array(["a"]), None):
        assert trends.number_of(record(0, value)) is None
    assert trends.Trends().of([record(0, "a"), record(1, 1.5)]) == (1.5,)


def test_without_time_the_oldest_are_left_out_and_come_later(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(trends.time, "monotonic", lambda: next(clock) / 100)
    tail = [record(i, np.full(4, float(i))) for i in range(10)]
    look = trends.Trends()
    look.look()
    first = look.of(tail)
    assert 0 < len(first) < 10
    assert first == tuple(float(i) for i in range(10 - len(first), 10))
    look.look()
    assert len(look.of(tail)) > len(first)


def test_large_tensors_are_not_read_for_a_trend():
    large = record(0, np.zeros(trends._LARGEST // 8 + 1))
    assert trends.number_of(large) is None
    counted = msgspec.structs.replace(large, value=None, stats=summarize_array(np.ones(3)))
    assert trends.number_of(counted) == 1.0


def test_how_often():
    each = [record(i, 1.0) for i in range(5)]
    assert trends.rate_of(each, 4_500_000_000) == 1.0
    assert trends.rate_of(each, 60 * 10**9) == 0.0
    assert trends.rate_of(each[:1]) == 0.0
    at_once = [record(1, 1.0)] * 3
    assert trends.rate_of(at_once, 10**9) == 1e9
