"""The collection of faulty and healthy programs: complete, well-formed, in balanced halves."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.health.collection.__main__ import FOLDER, SET_UPS, programs, table_of, verdict_of

ROWS = programs()


def test_lists_every_program_once():
    listed = [row["file"] for row in ROWS]
    found = [
        str(p.relative_to(FOLDER))
        for kind in ("bugs", "healthy")
        for p in (FOLDER / kind).rglob("*.py")
    ]
    assert sorted(listed) == sorted(found)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["file"])
def test_program_compiles_and_is_described(row):
    text = (FOLDER / row["file"]).read_text()
    compile(text, row["file"], "exec")
    assert row["set-up"] in SET_UPS
    assert row["family"]
    assert row["what"].endswith(".")
    assert all(re.compile(cause) for cause in row.get("cause", ()))
    assert bool(row.get("cause")) == (row["kind"] == "bugs")


def test_halves_are_balanced():
    halves = Counter((row["kind"], row["half"]) for row in ROWS)
    assert halves["bugs", "tuned"] == halves["bugs", "held"] >= 40
    assert halves["healthy", "tuned"] == halves["healthy", "held"] >= 20
    for set_up, least in zip(SET_UPS, (40, 8, 8, 8, 6, 6, 6), strict=True):
        assert sum(row["set-up"] == set_up for row in ROWS) >= least


def test_reads_alerts_and_hints_apart():
    text = (
        "tensortap: runs/1: of 3 rules, 1 found a problem, 1 gave a hint, 1 found nothing\n"
        "● nan: loss since step 7\n  message\n● decay: weight\n  message\n● fine: inf\n"
    )
    alerts, hints = verdict_of(text)
    assert [block.split(":")[0] for block in (*alerts, *hints)] == ["nan", "decay"]
    assert len(alerts) == 1
    row = {"file": "f", "set-up": "plain", "alerts": alerts, "hints": hints, "same": True}
    assert "| plain | 1 | 0 | 1 | 0 | 0 | 0 | 0 |" in table_of([row | {"outcome": "missed"}])
