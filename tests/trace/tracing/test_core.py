"""Checks of the instrumentation on every supported Python that is installed."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "src"

_spec = importlib.util.spec_from_file_location("locals_core", HERE / "core.py")
core = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(core)


@pytest.mark.slow
@pytest.mark.parametrize("check", core.CHECKS, ids=lambda check: check.__name__[6:])
def test_in_this_python(check):
    check()


def pythons() -> dict[str, str]:
    """Return the other supported Pythons that are installed, on the path or by pyenv."""
    found = {}
    for minor in (11, 12, 13):
        paths = sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/3.{minor}.*/bin/python")))
        on_path = shutil.which(f"python3.{minor}")
        for one in [*paths, *([on_path] if on_path else [])]:
            probed = subprocess.run(
                [one, "-c", "import sys; print(*sys.version_info[:2])"],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if probed.stdout.split() == ["3", str(minor)]:  # a pyenv shim may point nowhere
                found[f"3.{minor}"] = one
    found.pop("{}.{}".format(*sys.version_info[:2]), None)
    return found


PYTHONS = pythons()


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS.values(), ids=PYTHONS.keys())
def test_in_another_python(python):
    done = subprocess.run(
        [python, "-W", "error", str(HERE / "core.py"), str(SOURCES)],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.match(r"\d+ checks on 3\.", done.stdout)
