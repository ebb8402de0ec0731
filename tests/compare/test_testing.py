"""Assertions for the tests of users."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tensortap as tap

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
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
    report = tap.rooms.compare.testing.assert_runs_match(runs["right"], str(runs["right"]))
    assert report.compared == 4
    tap.rooms.compare.testing.assert_runs_match(runs["wrong"], runs["right"], rtol=2e-3)
    tap.rooms.compare.testing.assert_runs_match(
        tap.open(runs["wrong"]), runs["right"], steps=(None, 1)
    )
    tap.rooms.compare.testing.assert_runs_match(runs["short"], runs["right"], allow_missing=True)


def test_differing_runs_fail(runs):
    with pytest.raises(AssertionError) as caught:
        tap.rooms.compare.testing.assert_runs_match(runs["wrong"], runs["right"])
    text = str(caught.value)
    assert "hidden  Value  step 2  rank 0" in text
    assert "\x1b" not in text
    with pytest.raises(AssertionError, match="only in the second"):
        tap.rooms.compare.testing.assert_runs_match(runs["short"], runs["right"])


def test_runs_with_nothing_in_common_fail(runs):
    with pytest.raises(AssertionError, match="nothing to compare"):
        tap.rooms.compare.testing.assert_runs_match(
            runs["right"], runs["right"], names="no such name"
        )


def test_rejects_values_that_are_not_runs(runs, tmp_path):
    with pytest.raises(tap.TensortapError, match="which does not exist"):
        tap.rooms.compare.testing.assert_runs_match(runs["right"], tmp_path / "nothing")
    with pytest.raises(tap.TensortapError, match="no such file"):
        tap.rooms.compare.testing.assert_runs_match("nothing", "nothing")


def test_report_is_the_message_in_pytest(runs, tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nnames = "hidden"\nrtol = 0.1\n')
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent(f"""
        import tensortap as tap

        def test_strictly():
            testing = tap.rooms.compare.testing
            testing.assert_runs_match({str(runs["wrong"])!r}, {str(runs["right"])!r})

        def test_by_rules():
            tap.rooms.compare.testing.assert_runs_match(
                {str(runs["wrong"])!r}, {str(runs["right"])!r}, rules={str(rules)!r})
        """)
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "hidden  Value  step 2  rank 0" in done.stdout
    assert "assert_runs_match(run: Any" not in done.stdout  # not our own lines
