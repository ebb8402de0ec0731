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
    table = text.partition(f"\n## {kind.title()}s\n")[2].partition("\n## ")[0]
    promised = set(re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE))
    assert promised
    assert promised - names(kind) == set()
