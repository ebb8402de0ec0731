"""Rules: the file, the grammar, and their effect."""

from __future__ import annotations

import numpy as np
import pytest

from tensortap.core.errors import NotFound, TensortapError
from tensortap.rooms.compare.result import Comparison
from tensortap.rooms.compare.rules import BadCondition, condition, load_rules, parse_rules
from tensortap.rooms.compare.runs import compare_runs

FAR = Comparison(False, count=10, max_abs=1e-3, rel_l2=1e-4, mismatches=2, cosine=0.5)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("max_abs <= 1e-3", True),
        ("max_abs < 1e-3", False),
        ("rel_l2 <= 1e-3 or max_abs <= 1e-6", True),
        ("rel_l2 <= 1e-3 and max_abs <= 1e-6", False),
        ("mismatches > 1 and (share <= 0.1 or cosine >= .5)", True),
        ("(max_abs<=1)", True),
        ("ulps <= 4", False),  # not known: does not hold
        ("max_abs <= 1 or max_abs <= 0 and max_abs <= 0", True),  # and binds closer
    ],
)
def test_conditions(text, holds):
    assert condition(text).holds(FAR) is holds


def test_condition_never_holds_for_non_finite_values():
    assert not condition("max_abs <= 1").holds(Comparison(False, count=3, nonfinite=1))
    assert not condition("max_abs <= 1").holds(Comparison(False, "shapes"))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", 0),
        ("max_abs", 7),
        ("max_abs <=", 10),
        ("max_abs <= x", 11),
        ("size <= 1", 0),
        ("max_abs <= 1 max_abs <= 1", 13),
        ("(max_abs <= 1", 13),
        ("max_abs == 1", 8),
        ("__import__('os')", 0),
        ("max_abs <= 1; x", 12),
    ],
)
def test_errors_have_a_position(text, place):
    with pytest.raises(BadCondition) as error:
        condition(text)
    assert error.value.position == place


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("[[rule]\nnames = 1", "line 1, column"),
        ('[[rule]]\nnames = "("', "line 2, column 1"),
        ('[[rule]]\nnames = "a"\n\n[[rule]]\n  nmes = "b"', "line 5, column 3"),
        ('[[rule]]\npass = "max_abs <= oops"', "line 2, column 20"),
        ('[[rule]]\nkinds = ["Activations"]', "line 2, column 1"),
        ("[[rule]]\natol = -1", "line 2, column 1"),
        ("[[rule]]\nrtol = 'x'", "line 2, column 1"),
        ("[other]\n", "line 1, column"),
    ],
)
def test_file_errors_name_line_and_column(text, where):
    with pytest.raises(TensortapError, match=where):
        parse_rules(text)


def test_no_such_file(tmp_path):
    with pytest.raises(NotFound):
        load_rules(tmp_path / "rules.toml")


def test_rules_override_the_tolerance(write, tmp_path):
    x = np.arange(5000, dtype="f4") + 1
    one = write([(n, "Value", 0, x) for n in ("a", "b", "c", "d")])
    two = write([(n, "Value", 0, x * np.float32(1.001)) for n in ("a", "b", "c", "d")])
    path = tmp_path / "rules.toml"
    path.write_text("""
        [[rule]]
        names = "^a$"
        rtol = 1e-2

        [[rule]]
        names = "^b$"
        pass = "rel_l2 <= 2e-3"

        [[rule]]
        names = "^c$"
        ignore = true

        [[rule]]
        names = "^d$"
        expected = "d is known to differ"
    """)
    report = compare_runs(one, two, rules=path)
    assert report, str(report)
    assert report.ignored == 1
    assert [d.expected for d in report.differences] == ["d is known to differ"]
    assert report.first is None
    assert len(compare_runs(one, two).differences) == 4


def test_first_matching_rule_applies():
    book = parse_rules('[[rule]]\nnames="x"\natol=1\n[[rule]]\nnames="."\natol=2')
    assert book.find("x", "Value").atol == 1
    assert book.find("y", "Value").atol == 2
    assert parse_rules("").find("x", "Value") is None
    kinds = parse_rules('[[rule]]\nkinds=["Gradient"]\natol=1')
    assert kinds.find("x", "Value") is None
    assert kinds.find("x", "Gradient").atol == 1
