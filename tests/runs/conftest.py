"""Programs that keep runs, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_program(folder: Path, code: str, *args: str, env: dict[str, str] | None = None) -> str:
    """Run a program in a folder to its end; what it printed."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, str(path), *args],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **(env or {})},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def program(tmp_path):
    """Run a program in `tmp_path`."""
    return lambda code, *args, **options: run_program(tmp_path, code, *args, **options)
