"""Recent trend and capture rate per name."""

from __future__ import annotations

import math
from types import SimpleNamespace

import msgspec
import numpy as np

from tensortap import values as frameworks
from tensortap.core.buffers import Pool
from tensortap.core.record import Kind, Record
from tensortap.live import answers
from tensortap.live.answers import RecordCache, record_key
from tensortap.stats import summarize_array


def record(number: int, value=None, stats=None, name="x") -> Record:
    shape = getattr(value, "shape", ())
    snapshot, _ = frameworks.snapshot(value, Pool())
    return Record(name, Kind.VALUE, number, 0, number, 0, 1, number * 10**9, shape=shape,
                  value=snapshot, stats=stats)  # fmt: skip


def test_number_of_a_record():
    tensor = np.array([3.0, -4.0], np.float32)
    assert answers.number_of(record(0, 7)) == 7.0
    assert answers.number_of(record(0, tensor)) == math.sqrt(12.5)
    assert answers.number_of(record(0, None, summarize_array(tensor))) == math.sqrt(12.5)
    assert answers.number_of(record(0, np.array(-2.0))) == -2.0
    assert math.isnan(answers.number_of(record(0, np.array([1.0, np.nan]))))
    assert math.isnan(answers.number_of(record(0, None, summarize_array(np.array([np.inf])))))


def test_records_without_a_number_are_left_out():
    for value in ("words", np.zeros(0), np.array(["a"]), None):
        assert answers.number_of(record(0, value)) is None
    assert answers.trend([record(0, "a"), record(1, 1.5)], 0.0) == (1.5,)


def test_after_the_deadline_the_oldest_records_are_left_out(monkeypatch):
    tail = [record(i, np.full(4, float(i)), name="slow") for i in range(10)]
    clock = iter(range(100))
    monkeypatch.setattr(answers, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert answers.trend(tail, 3) == (6.0, 7.0, 8.0, 9.0)
    assert answers.trend(tail, 6) == (4.0, 5.0, 6.0, 7.0, 8.0, 9.0)


def test_large_tensors_are_not_read_for_a_trend():
    large = record(0, np.zeros(answers._LARGEST_TENSOR // 8 + 1))
    assert answers.number_of(large) is None
    counted = msgspec.structs.replace(large, value=None, stats=summarize_array(np.ones(3)))
    assert answers.number_of(counted) == 1.0


def test_captures_per_second():
    each = [record(i, 1.0) for i in range(5)]
    assert answers.captures_per_second(each, 4_500_000_000) == 1.0
    assert answers.captures_per_second(each, 60 * 10**9) == 0.0
    assert answers.captures_per_second(each[:1]) == 0.0
    simultaneous = [record(1, 1.0)] * 3
    assert answers.captures_per_second(simultaneous, 10**9) == 1e9


def test_cache_is_bounded():
    cache = RecordCache(8)
    keys = [record_key(record(i, 1)) for i in range(100)]
    for key in keys:
        cache[key] = "line"
    assert len(cache) <= 8
    assert keys[-1] in cache
