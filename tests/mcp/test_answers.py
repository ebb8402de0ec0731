"""Answers have a bound, hold no control characters, and are the whole truth in several calls."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensortap.core.errors import TensortapError
from tensortap.rooms.mcp.answers import MOST_BYTES, answer

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
trees = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30
)


def checked(text):
    assert len(text.encode()) <= MOST_BYTES
    assert text.isprintable()
    return json.loads(text)


@pytest.mark.slow
@given(st.dictionaries(st.text(), trees), st.lists(trees, max_size=20))
def test_any_value(facts, rows):
    checked(answer(facts))
    found = checked(answer(facts, rows))
    assert len(found["rows"]) == len(rows) == found["total"]


@pytest.mark.parametrize("row", ["é" * 600, {"a": ["\x1b[2J" * 200] * 50}, {"n" * 9: 1 << 99}])
def test_all_rows_are_there_in_several_calls(row):
    rows, offset, calls = [row] * 300, 0, 0
    while offset is not None:
        found = checked(answer({"config": row}, rows, offset, 500))
        shown, calls = len(found["rows"]), calls + 1
        assert shown
        offset = offset + shown if "more" in found else None
        assert offset is None or f"offset={offset}" in found["more"]
    assert calls > 1 or len(str(row)) < 99


HUGE = {
    "text": "x" * 10**6, "list": ["x" * 400] * 10**4, "integer": 1 << 10**6,
    "dict": {str(i): "x" * 99 for i in range(10**4)},
}  # fmt: skip


@pytest.mark.parametrize("what", HUGE)
def test_a_huge_fact_or_row_is_cut_and_says_so(what):
    huge = HUGE[what]
    deep = huge
    for _ in range(5000):
        deep = [deep]
    for value in (huge, deep, [[huge] * 5] * 5):
        found = checked(answer({"fact": value, "other": 1}, [value] * 3))
        assert found["other"] == 1
        assert len(found["rows"]) >= 1
        assert "…" in json.dumps(found, ensure_ascii=False) or "bits" in str(found)


@pytest.mark.parametrize(("offset", "limit"), [(-1, 5), (0, 0), (0, 501)])
def test_wrong_pages_are_named(offset, limit):
    with pytest.raises(TensortapError, match="offset must be at least 0 and limit from 1 to 500"):
        answer({}, [1], offset, limit)
