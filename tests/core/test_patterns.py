"""Regular expressions over names: those of Python in programs, those of RE2 from pages."""

from __future__ import annotations

import re

import pytest

from tensortap.core.errors import PatternError
from tensortap.core.patterns import TypedPattern

NAMES = ["embed", "blocks.0.attn", "blocks.11.MLP", "größe", "a b", ""]


@pytest.mark.parametrize(
    "text", ["", "^blocks", r"\d+\.", "mlp$", "[a-c]o", "e|0", "gr.ße", r"\bb", ".{3}", "(?i)EMB"]
)
def test_finds_what_python_finds(text):
    for ignore_case in (False, True):
        wanted = re.compile(text, re.IGNORECASE if ignore_case else 0)
        found = TypedPattern(text, ignore_case=ignore_case)
        assert [found.search(name) for name in NAMES] == [bool(wanted.search(n)) for n in NAMES]


@pytest.mark.parametrize("text", ["(?=x)", "(?<!x)", r"(a)\1", "a{2000}", "a*+"])
def test_names_what_is_not_supported(text, capfd):
    with pytest.raises(PatternError, match="lookaround, backreferences and repetitions above"):
        TypedPattern(text)
    assert capfd.readouterr().err == ""  # RE2 logs errors by default


@pytest.mark.parametrize("text", ["(", "[z-a]", "\ud800", "x" * 1001, "(" * 900])
def test_rejects_invalid_patterns(text):
    with pytest.raises(PatternError, match=r"not a regular expression|at most 1,000 characters"):
        TypedPattern(text)


@pytest.mark.attack("pattern that backtracks")
@pytest.mark.parametrize(
    "text", ["(x+x+)+y", "(x|x)*y", "(x*)*y", "(.*)*=", "(x?){500}y", "(.{0,999}y){1}", "x*" * 400]
)
def test_takes_linear_time(text):
    """An engine that backtracks would not end."""
    TypedPattern(text).search("x" * 2000)


def test_searches_in_any_name():
    assert TypedPattern("b$").search("\ud800b")
