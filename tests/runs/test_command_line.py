"""The commands for runs on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.commands import type_in
from tests.runs.conftest import ROOT

pytestmark = pytest.mark.slow

TRAIN = """
    import numpy as np, tensortap as tap
    print(tap.init("experiments"))
    for step in range(4):
        tap.step(step)
        tap.catch(np.full((2, 3), step, np.float32), "hidden")
        tap.catch(step * 0.5, "loss")
    tap.dump(np.ones(3), "out")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, run_program):
    """A folder with one run."""
    folder = tmp_path_factory.mktemp("project")
    run_program(folder, TRAIN)
    return folder


def tensortap(folder, *arguments, code=0, real=False):
    if real:  # in its own process
        done = subprocess.run(
            [sys.executable, "-m", "tensortap", *map(str, arguments)],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"},
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        ended, out, said = done.returncode, done.stdout, done.stderr
    else:
        ended, out, said = type_in(*arguments, cwd=folder)
    assert ended == code, said + out
    assert "Traceback" not in said
    return out, said


@pytest.fixture
def run(folder):
    (path,) = (folder / "experiments").iterdir()
    return path


def test_ls(folder, run):
    out, _ = tensortap(folder, "ls", "experiments", real=True)
    assert run.name in out
    assert "ended" in out or "complete" in out
    (found,) = json.loads(tensortap(folder, "ls", "experiments", "--json")[0])
    assert (found["records"], found["names"], found["ranks"]) == (9, 3, 1)


def test_show(folder, run):
    out, _ = tensortap(folder, "show", run, real=True)
    assert all(name in out for name in ("hidden", "loss", "out"))
    out, _ = tensortap(folder, "show", run, "hidden", "--step", 2, "--rank", 0, "--values")
    assert "step 2" in out
    assert "[[2. 2. 2.]" in out
    _, said = tensortap(folder, "show", run, "hidden", "--step", 9, code=2)
    assert "nearest captured step is 3" in said
    _, said = tensortap(folder, "show", run, "hidden", "--rank", 7, code=2)
    assert "no 'hidden' on rank 7; it is on rank 0" in said
    _, said = tensortap(folder, "show", run, "hiden", code=2)
    assert "did you mean 'hidden'" in said
    _, said = tensortap(folder, "show", folder, code=2)
    assert "is not a run" in said
