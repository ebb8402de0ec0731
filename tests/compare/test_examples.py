"""The example that finds bugs in a transformer names layer, step and rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tensortap as tap

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BUGS = ("scale", "heads", "rounding", "race")


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """What the example prints, and the folder of its runs."""
    folder = tmp_path_factory.mktemp("example")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "compare_transformer.py")],
        cwd=folder, env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin",
        "TENSORTAP_SERVER": "127.0.0.1:1", "XDG_CONFIG_HOME": str(folder),
        "TENSORTAP_MODIFICATIONS": "0"},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, folder / "compare_transformer"


def report_of(example, bug):
    run, right = (next((example[1] / name).iterdir()) for name in (bug, "right"))
    return tap.compare(run, right)


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("bug", "place", "rank", "why"),
    [
        ("scale", ("blocks.1.attention.scores", "Activation", 2), 0, ("a is 1/2 times b",)),
        ("heads", ("blocks.2.attention.merge", "Activation", 3), 0, ()),
        ("rounding", ("blocks.0.mlp.1", "Activation", 1), 0, ("a is b rounded to bfloat16",)),
        ("race", ("blocks.2.mlp.0.weight", "Weight_Gradient", 4), 1, ()),
    ],
)
def test_finds_the_bug(example, bug, place, rank, why):
    report = report_of(example, bug)
    first = report.first
    assert (first.key.name, first.key.kind, first.key.step) == place
    assert first.key.rank == rank
    assert first.explanations == why
    assert place[0] in report.culprit
    assert not report.missing
    assert f"first: {place[0]}  {place[1]}  step {place[2]}  rank {rank}" in example[0]


@pytest.mark.timeout(500)
def test_only_the_racing_rank_differs_at_first(example):
    report = report_of(example, "race")
    at_first = [each for each in report.differences if each.key.step == 4]
    assert {each.key.rank for each in at_first} == {1}
    assert {each.key.rank for each in report.differences if each.key.step == 5} == {0, 1}
