"""A record in one line."""

from __future__ import annotations

import numpy as np
import pytest

from tensortap.api import glance
from tensortap.buffers import Pool
from tensortap.frameworks import snapshot
from tensortap.record import Fields, Items, Mapping, Number, Opaque, TensorData
from tests.readers.contract import record, tensor


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (None, "None"),
        (True, "True"),
        (7, "7"),
        (0.1 + 0.2, "0.3"),
        ("text", "'text'"),
        (Items("list", (1, 2)), "list of 2: 1; 2"),
        (Items("tuple", (1,) * 9), "tuple of 9: 1; 1; 1; 1; …"),
        (Mapping((("a", 1),)), "dict of 1: 'a': 1"),
        (Fields("dataclass", "m:Point", ("x", "y"), (1, 2)), "Point(x=1; y=2)"),
        (Opaque("m.T", "<T>"), "m.T: <T>"),
        (Number("complex", (1.0, -2.0)), "1-2j"),
        (Number("int", text=hex(10**30)), "1e30"),
        (tensor([3]), "[1] f32 3"),
        (TensorData("numpy", "<M8[ns]", (1,), bytes(8)), "[1] <M8[ns]"),
        (TensorData("torch", "float32", (0, 3), b""), "[0, 3] f32 empty"),
    ],
)
def test_lines(value, line):
    assert glance.describe(value) == line


def test_an_integer_of_ten_thousand_digits():
    value, _ = snapshot(10**10_000, Pool())
    assert glance.describe(value) == "1e10000"


@pytest.mark.parametrize("value", [Number("zero"), Number("int", text="12"), Number("complex")])
def test_a_number_of_a_stranger_is_shown_as_what_it_is(value):
    assert glance.describe(value).startswith("<not a number")


def test_a_line_is_worked_out_once(monkeypatch):
    one = record(1, "once", tensor(np.arange(100)))
    first = glance.line(one)
    monkeypatch.setattr(glance, "describe", lambda value: pytest.fail("again"))
    assert glance.line(one) == first


def test_what_is_remembered_is_bounded():
    for i in range(10_000):
        glance.line(record(i, "many", i))
    assert len(glance._known) <= glance._KEPT


def test_every_tensor_of_a_tree_in_a_line_of_its_own():
    tree = Mapping((("a", Items("list", (tensor([1, 2]), 5))), ("b", "text")))
    lines = glance.details(record(3, "tree", tree, rank=1, world_size=2)).split("\n")
    assert lines[0].startswith("tree  Value  step 3, rank 1 of 2")
    assert [line.split("  ")[1] for line in lines[1:]] == ["['a'][0]", "['a'][1]", "['b']"]
