"""Programs that write runs, in processes of their own."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def run_program(torch_forks):
    """Run a program in a folder to its end; returns what it printed."""

    def run(folder: Path, code: str, *arguments: str, env: dict[str, str] | None = None) -> str:
        program = folder / "program.py"
        program.write_text(textwrap.dedent(code))
        codes = torch_forks(program, {**os.environ, **(env or {})}, *arguments)
        assert codes == [0], Path(f"{program}.e0").read_text()
        return Path(f"{program}.o0").read_text()

    return run


@pytest.fixture
def program(run_program, tmp_path):
    """Run a program in `tmp_path`."""
    return lambda code, *arguments, **options: run_program(tmp_path, code, *arguments, **options)
