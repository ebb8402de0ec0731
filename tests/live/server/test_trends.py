"""Recent trend and capture rate per name."""

from __future__ import annotations

import math

import numpy as np

from tensortap.core.record import Kind, Record
from tensortap.live import answers
from tensortap.stats import summarize_array


def record(number: int, value=None, stats=None, name="x") -> Record:
    return Record(name, Kind.VALUE, number, 0, number, 0, 1, number * 10**9, value=value,
                  stats=stats)  # fmt: skip


def test_number_of_a_record():
    def of(*elements):
        return answers.number_of(record(0, None, summarize_array(np.array(elements, "f4"))))

    assert answers.number_of(record(0, 7)) == 7.0
    assert of(3.0, -4.0) == math.sqrt(12.5)
    assert of(-2.0) == -2.0
    assert math.isnan(of(1.0, np.nan))
    assert math.isnan(of(np.inf))
    assert of() is None
    assert answers.number_of(record(0, "words")) is None
