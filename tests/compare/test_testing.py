"""Assertions for the tests of users."""

from __future__ import annotations

import pytest

import tensortap as tap
from tensortap.rooms.compare.testing import assert_runs_match

pytestmark = pytest.mark.slow

TRAIN = """
    import sys, numpy as np, tensortap as tap
    factor, last = float(sys.argv[1]), int(sys.argv[2])
    print(tap.init("runs"))
    for step in range(last):
        tap.step(step)
        tap.catch(np.linspace(1, 2, 50) * (factor if step == 2 else 1), "hidden")
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, run_program):
    folder = tmp_path_factory.mktemp("project")

    def made(*arguments):
        env = {"TENSORTAP_SERVER": "127.0.0.1:1"}
        return folder / run_program(folder, TRAIN, *arguments, env=env).strip()

    return {"right": made("1", "4"), "wrong": made("1.001", "4"), "short": made("1", "3")}


def test_matching_runs_pass(runs):
    report = assert_runs_match(runs["right"], str(runs["right"]))
    assert report.compared == 4
    assert_runs_match(runs["wrong"], runs["right"], rtol=2e-3)
    assert_runs_match(tap.open(runs["wrong"]), runs["right"], steps=(None, 1))
    assert_runs_match(runs["short"], runs["right"], allow_missing=True)


def test_differing_runs_fail(runs):
    with pytest.raises(AssertionError) as caught:
        assert_runs_match(runs["wrong"], runs["right"])
    text = str(caught.value)
    assert "hidden  Value  step 2  rank 0" in text
    assert "\x1b" not in text
    with pytest.raises(AssertionError, match="only in the second"):
        assert_runs_match(runs["short"], runs["right"])


def test_runs_with_nothing_in_common_fail(runs):
    with pytest.raises(AssertionError, match="nothing to compare"):
        assert_runs_match(runs["right"], runs["right"], names="no such name")


def test_rejects_values_that_are_not_runs(runs, tmp_path):
    with pytest.raises(tap.TensortapError, match="which does not exist"):
        assert_runs_match(runs["right"], tmp_path / "nothing")
    with pytest.raises(tap.TensortapError, match="no such file"):
        assert_runs_match("nothing", "nothing")
