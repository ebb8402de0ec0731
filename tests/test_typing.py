"""Editors know the signatures of every verb: a user's program passes `mypy --strict`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("typed_script.py")


@pytest.mark.slow
def test_a_program_that_uses_every_verb():
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir=/dev/null", str(SCRIPT)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=SCRIPT.parents[1],
        env={"MYPYPATH": str(SCRIPT.parents[1] / "src"), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
