"""Programs that write runs, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def program(run_program, tmp_path):
    """Run a program in `tmp_path`."""
    return lambda code, *arguments, **options: run_program(tmp_path, code, *arguments, **options)
