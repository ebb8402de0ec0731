"""Ranges of steps, as people write them."""

from __future__ import annotations

import pytest

from tensortap.core.errors import TensortapError
from tensortap.core.select import parse_steps


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (None, None),
        ("", None),
        ("10:20", (10, 20)),
        ("10:", (10, None)),
        (":20", (None, 20)),
        (":", (None, None)),
        ("-3", (-3, -3)),
    ],
)
def test_parses_steps(text, steps):
    assert parse_steps(text) == steps


@pytest.mark.parametrize(
    ("text", "message"),
    [("ten", "steps must be like 10:20, got 'ten'"), ("5:2", "the first is after the last")],
)
def test_rejects_malformed_steps(text, message):
    with pytest.raises(TensortapError, match=message):
        parse_steps(text)
