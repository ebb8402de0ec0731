"""The example that finds bugs in a transformer names layer, step and rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tensortap as tap
from tensortap.rooms.compare.report import Key

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(500)
def test_finds_the_bugs(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "compare_transformer.py"), "scale", "race"],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin",
        "TENSORTAP_SERVER": "127.0.0.1:1", "XDG_CONFIG_HOME": str(tmp_path),
        "TENSORTAP_MODIFICATIONS": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "compare_transformer"
    for bug, key, why in (
        ("scale", Key("blocks.1.attention.scores", "Activation", 2, 0, 0), ("a is 1/2 times b",)),
        ("race", Key("blocks.2.mlp.0.weight", "Weight_Gradient", 4, 0, 1), ()),
    ):
        run, right = (next((folder / name).iterdir()) for name in (bug, "right"))
        report = tap.compare(run, right)
        assert (report.first.key, report.first.explanations) == (key, why)
        assert key.name in report.culprit
        assert not report.missing
        assert f"first    {key}" in done.stdout
    at_first = [each for each in report.differences if each.key.step == 4]
    assert {each.key.rank for each in at_first} == {1}  # only the rank that did not wait
    assert {each.key.rank for each in report.differences if each.key.step == 5} == {0, 1}
