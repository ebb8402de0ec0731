"""Records and values as text."""

from __future__ import annotations

import pytest

from tensortap.core.record import Fields, Items, Kind, Mapping, Number, Opaque, TensorData
from tensortap.text.records import record_details, record_line, value_line
from tests.runs.readers.contract import record, tensor


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
        (Number("int", text=hex(10**30)), "int of 100 bits"),
        (tensor([3]), "[1] f32 3"),
        (TensorData("numpy", "<M8[ns]", (1,), bytes(8)), "[1] <M8[ns]"),
        (TensorData("torch", "float32", (0, 3), b""), "[0, 3] f32 empty"),
    ],
)
def test_value_line(value, line):
    assert value_line(value) == line


@pytest.mark.parametrize("value", [Number("zero"), Number("int", text="12"), Number("complex")])
def test_malformed_number_shows_the_error(value):
    assert value_line(value).startswith("<not a number")


def test_details_have_one_line_per_leaf():
    tree = Mapping((("a", Items("list", (tensor([1, 2]), 5))), ("b", "text")))
    lines = record_details(record(3, "tree", tree, rank=1, world_size=2)).split("\n")
    assert lines[0].startswith("tree  Value  step 3, rank 1 of 2")
    assert [line.split("  ")[1] for line in lines[1:]] == ["['a'][0]", "['a'][1]", "['b']"]


def test_alert_shows_its_message():
    value = Mapping((("message", "3 NaN"), ("kind", "Gradient")))
    alert = record(1, "fc", value, kind=Kind.ALERT)
    assert record_line(alert) == "3 NaN"
    assert record_details(alert).endswith("\n  Gradient: 3 NaN")
    assert record_line(record(1, "fc", None, kind=Kind.ALERT)) == ""
