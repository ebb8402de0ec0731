"""The security page promises what `make attack` and `make faults` show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


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
