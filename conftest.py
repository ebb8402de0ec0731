"""Which files pytest collects: importing a file without anything to run costs time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SRC = Path(__file__).parent / "src"
SLOW = re.compile(r"^pytestmark = (?:\[[^\]]*)?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip sources without doctests, and in `make check` files in which all tests are slow."""
    if collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    if SRC in collection_path.parents:
        return True if ">>>" not in text else None
    return True if config.option.markexpr == "not slow" and SLOW.search(text) else None
