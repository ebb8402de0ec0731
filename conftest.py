"""Shared fixtures, and which files pytest collects: importing one without tests costs time."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

pytest_plugins = ["tests.fixtures", "tests.proof"]
SOURCES = Path(__file__).parent / "src"
SLOW = re.compile(r"^pytestmark = (?:\[[^\]]*)?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without tests or doctests, and in `make check` those with slow tests only.

    To be collected is to be imported, which runs a program: it would leave its runs here.
    """
    if collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    if not collection_path.name.startswith("test_"):
        if ">>>" not in text:
            return True
        if SOURCES in collection_path.parents:
            # pytest would execute a module twice that its package imports: two classes of one name
            importlib.import_module(".".join(collection_path.parent.relative_to(SOURCES).parts))
        return None
    return True if config.option.markexpr == "not slow" and SLOW.search(text) else None
