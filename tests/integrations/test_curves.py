"""Curves of a run."""

from __future__ import annotations

import pytest

from tensortap.core.errors import TensortapError
from tensortap.core.record import Kind, Record
from tensortap.rooms.integrations import curves


@pytest.mark.slow
def test_every_record_gives_one_point(tracked, monkeypatch):
    found = list(curves.curve_points(tracked))
    with monkeypatch.context() as patch:
        patch.setattr(curves, "_CHUNK", 7)
        assert sorted(map(repr, curves.curve_points(tracked))) == sorted(map(repr, found))
    assert len(found) == len(tracked.stats())
    tags = [(p.rank, p.step, tag) for p in found for tag in p.numbers]
    assert len(tags) == len(set(tags))


def test_tags(tracked):
    numbers = {tag for point in curves.curve_points(tracked) for tag in point.numbers}
    assert {
        "loss",
        "half",
        "Weight/rm2/0",
        "Weight/std/0.bias",
        "Weight_Gradient/max_abs/2",
        "Optimiser_State.exp_avg/rm2/0",
        "Activation/nans/1",
        "Activation/rm2/1/call1",
        "Gradient/numel/2",
        "Value/nans/caught",
    } <= numbers


def test_names(tracked):
    found = list(curves.curve_points(tracked, names=r"^0\."))
    tags = {tag for point in found for tag in point.numbers}
    assert {"Weight/rm2/0", "Weight/rm2/0.bias"} <= tags
    assert not any("/2" in tag for tag in tags)
    with pytest.raises(TensortapError, match="not a regular expression"):
        curves.curve_points(tracked, names="(")


def test_text_has_no_point():
    record = Record("text", Kind.VALUE, 0, 0, 0, 0, 1, 0, value="no number")
    assert list(curves.curve_points([record])) == []
