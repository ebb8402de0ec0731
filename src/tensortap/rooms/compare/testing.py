"""Assertions for your own tests.

import tensortap as tap


def test_the_training_is_what_it_was(tmp_path):
    run = train(tmp_path)  # something that returns the folder of a run
    assert_runs_match(run, "tests/data/reference", rtol=1e-4, rules="rules.toml")
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensortap.core.errors import TensortapError
from tensortap.rooms.compare.api import compare
from tensortap.rooms.compare.report import CompareReport

__all__ = ["assert_runs_match"]


def assert_runs_match(run: Any, reference: Any, **options: Any) -> CompareReport:
    """Raise AssertionError with the report as message unless two runs agree; return the report.

    Both are paths, `Run` objects or live sessions; the options are those of `tap.compare`:
    `atol`, `rtol`, `equal_nan`, `names`, `kinds`, `steps`, `ranks`, `mapping`, `rules`,
    `allow_missing`, `trust`. Runs with nothing in common fail, too: a test that compares nothing
    would always pass.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    sides = [Path(side) if isinstance(side, str) else side for side in (run, reference)]
    report = compare(*sides, **options)
    if not isinstance(report, CompareReport):
        raise TensortapError(f"assert_runs_match needs two runs, got {run} and {reference}")
    if not report:
        raise AssertionError(str(report))
    if not report.compared:
        raise AssertionError(f"{report.a} and {report.b} have nothing to compare")
    return report
