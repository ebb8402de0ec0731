"""The examples in docs/ run as written."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


PAGES = (
    "align bisect compare figures films hdf5 health live notebook numerics ops page quickstart "
    "runs trace track watch widths"
).split()


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_examples_of_a_page_run(tmp_path, page, forks):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    program = tmp_path / "program.py"
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    program.write_text(code.replace("while True:  # until Ctrl-C", "for _ in range(20):"))
    env = dict(
        os.environ,
        PYTHONPATH=str(ROOT / "src"),
        XDG_CONFIG_HOME=str(tmp_path),
        TENSORTAP_SERVER="127.0.0.1:1",
    )
    assert forks(program, env) == [0], Path(f"{program}.e0").read_text()


def test_every_rule_is_documented():
    from tensortap import alerts

    text = "".join((ROOT / "docs" / f"{page}.md").read_text() for page in ("numerics", "health"))
    for rule in alerts.default_rules():
        assert f"`alerts.{rule.__name__}(" in text


def test_every_analysis_is_documented():
    from tensortap.rooms.analyses.analysis import FAMILIES

    text = (ROOT / "docs" / "health.md").read_text()
    assert [family for family in FAMILIES if f"\n| `{family}` |" not in text] == []


def test_pages_fit_their_budget():
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    assert sum(len(page.read_text().split()) for page in pages) <= 24_000
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 45


def test_architecture_table_names_files_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.partition("## I want to add a")[2].partition("\n## ")[0]
    paths = re.findall(r"`((?:src|tests|docs)/[^`]+)`", table)
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_architecture_describes_every_folder():
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = [path.name for path in (ROOT / "src" / "tensortap").iterdir() if path.is_dir()]
    named = [name for name in folders if name != "__pycache__" and f"`{name}/`" not in text]
    assert named == []
    rooms = [path.parent.name for path in (ROOT / "src/tensortap/rooms").glob("*/room.py")]
    assert [room for room in rooms if f"\n| `{room}` |" not in text] == []
