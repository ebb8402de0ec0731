"""The tables of `make attack` and `make faults`, and the page that promises what they show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MARKED = """
import pytest

@pytest.mark.attack("wrong key")
@pytest.mark.parametrize("n", [1, 2])
def test_key(n):
    pass

@pytest.mark.attack("garbage")
def test_garbage(rounds):
    assert rounds(3, 1500) == 1500

@pytest.mark.attack("garbage")
def test_more_garbage(record_property):
    record_property("tried", 20)
    raise AssertionError

@pytest.mark.attack("other users")
def test_users():
    pytest.skip("no root")

@pytest.mark.fault("kill -9")
def test_kill():
    pass
"""


@pytest.mark.slow
def test_table(tmp_path):
    (tmp_path / "test_marked.py").write_text(MARKED)
    markers = "[pytest]\nmarkers =\n    attack(name)\n    fault(name)\n"
    (tmp_path / "pytest.ini").write_text(markers)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.proof", "-m", "attack", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    table = [line.split() for line in done.stdout.split("- attacks -")[1].splitlines()]
    assert ["wrong", "key", "2", "2", "2"] in table
    assert ["garbage", "2", "1520", "1500"] in table
    assert ["other", "users", "0", "0", "0"] in [cells[:5] for cells in table]
    assert "3 attacks, tried 1,522 times, not held 20" in done.stdout
    assert "kill" not in done.stdout


def names(kind: str) -> set[str]:
    """Return what tests are marked with."""
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    return {name for text in texts for name in re.findall(rf'mark\.{kind}\(\s*"(.+?)"', text)}


@pytest.mark.parametrize("kind", ["attack", "fault"])
def test_security_page_names_only_what_is_tested(kind):
    text = (ROOT / "docs" / "security.md").read_text()
    promised = set(re.findall(rf"^\| `{kind}: (.+?)` \|", text, re.MULTILINE))
    assert promised
    assert promised - names(kind) == set()
