"""Editors know the signatures of every verb: a user's program passes `mypy --strict`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("typed_script.py")
FIGURE = """
from typing import Any
class Figure:
    def __init__(self, data: Any) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
def __getattr__(name: str) -> Any: ...
"""


@pytest.mark.slow
def test_a_program_that_uses_every_verb(tmp_path):
    stubs = tmp_path / "plotly"  # plotly says nothing about its types
    stubs.mkdir()
    (stubs / "__init__.pyi").touch()
    (stubs / "graph_objects.pyi").write_text(FIGURE)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir=/dev/null", str(SCRIPT)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=SCRIPT.parents[1],
        env={"MYPYPATH": f"{SCRIPT.parents[1] / 'src'}:{tmp_path}", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
