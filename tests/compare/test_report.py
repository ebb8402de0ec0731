"""Reports as text, as JSON, in a notebook, and the values behind them."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

import tensortap as tap
from tensortap.core.errors import TensortapError
from tensortap.rooms.compare.provenance import provenance_diff
from tensortap.rooms.compare.report import CompareReport, Difference, Key, Missing, missing_rows
from tensortap.rooms.compare.result import Comparison, as_json
from tensortap.rooms.compare.runs import compare_runs
from tensortap.rooms.compare.text import report_text

HOSTILE = "\x1b[31m</script>[/bold]'\"\n😀"


def layers(change=lambda name, step, x: x, steps=4):
    rng = np.random.default_rng(0)
    found = []
    for step in range(steps):
        for name in ("embed", "attn", "mlp"):
            x = rng.standard_normal((6, 8)).astype("f4")
            found.append((name, "Activation", step, change(name, step, x)))
    return found


def shown(renderable, width=100):
    file = io.StringIO()
    Console(file=file, width=width).print(renderable)
    return file.getvalue()


@pytest.fixture
def report(write):
    def half(name, step, x):
        return x / 2 if step >= 2 and name == "attn" else x

    return compare_runs(write(layers(half)), write(layers()))


def test_text_of_a_difference(report):
    text = shown(report)
    assert text.startswith("✗ differ")
    assert "12 records compared, 2 differ" in text
    assert "attn  Activation  step 2  rank 0" in text
    assert "because  a is 1/2 times b" in text
    assert "culprit  attn: everything before it agrees" in text
    rows = [line.split() for line in text.splitlines() if line.strip().endswith("100.0%")]
    assert [(row[0], row[1]) for row in rows] == [("2", "attn"), ("3", "attn")]
    assert " rank " not in text.splitlines()[-3]  # a column of zeros says nothing


@pytest.mark.parametrize("width", [70, 80, 160])
def test_narrow_terminal_has_one_line_per_difference(width):
    note = "statistics differ: " + "min -2.14423 and -3.20997, " * 3
    found = Comparison(
        equal=False, reason="", notes=(note,), max_abs=1.2, max_rel=0.3, count=4, mismatches=4
    )
    key = Key("blocks.2.mlp", "Activation", 60, 0, 0)
    report = CompareReport("a", "b", 2, 0, 2, differences=(Difference(key, found),) * 2)
    lines = shown(report_text(report), width).splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("step")) :]
    rows = [line for line in table if "blocks.2.mlp" in line]
    assert all("Activation" in row and "1.2" in row and "statistics" in row for row in rows)
    assert ("relative" in table[0]) == (width == 160)
    if width < 160:
        assert len(table) == 3  # the heading, and a line each


def test_missing_records_are_listed_with_steps(write):
    other = [row for row in layers() if row[0] != "mlp" or row[2] == 1]
    report = compare_runs(write(layers()), write([*other, ("new", "Value", 9, 1.0)]))
    text = shown(report)
    assert "only in the first" in text
    assert "steps 0-3" in text
    assert "only in the second" in text
    assert "step 9" in text
    found = missing_rows(report.missing)
    assert [(row[0], row[2]) for row in found] == [("mlp", "3"), ("new", "1")]


def test_environment_differences_come_first():
    provenance = {
        "command": (["train.py"], ["train.py", "--fast"]),
        "packages": ({"torch": "2.1"}, {"torch": "2.2"}),
        "environment": ({"SEED": None}, {"SEED": HOSTILE}),
    }
    text = shown(CompareReport("a", "b", 1, 1, 0, provenance=provenance))
    lines = [line.split() for line in text.splitlines()]
    assert ["package", "torch", "2.1", "2.2"] in lines
    assert ["command", "train.py", "train.py", "--fast"] in lines
    assert "$SEED" in text
    assert "\x1b" not in text


def test_control_characters_do_not_reach_the_terminal():
    key = Key(HOSTILE + "x" * 5000, "Activation", 0, 0, -1)
    found = Difference(key, Comparison(False, HOSTILE), explanations=(HOSTILE,))
    report = CompareReport(
        HOSTILE, "b", 1, 0, 0, (found, Difference(key, Comparison(False, HOSTILE))),
        (Missing(key, "a", True),), culprit=HOSTILE,
    )  # fmt: skip
    text = shown(report)
    assert "\x1b" not in text
    assert "😀" in text
    assert "[31m" in text  # nor is it taken for markup
    assert len(text) < 20_000
    assert "dropped 1" in text


def test_values_of_a_difference_are_read_lazily(report):
    a, b = report.values(report.first)
    assert isinstance(a, np.ndarray)
    assert np.array_equal(a, b / 2)
    with pytest.raises(TensortapError, match="cannot read the values"):
        CompareReport("a", "b", 1, 1, 0).values(report.first)


def test_json_report_is_complete(report):
    text = json.dumps(report.to_json(), allow_nan=False)
    found = json.loads(text)
    assert (found["format"], found["of"], found["agree"]) == (1, "runs", False)
    assert (found["compared"], found["equal"]) == (12, 10)
    assert found["first"] == found["differences"][0]
    first = found["first"]
    assert (first["name"], first["kind"], first["step"], first["rank"]) == (
        "attn", "Activation", 2, 0,
    )  # fmt: skip
    assert first["explanations"] == ["a is 1/2 times b"]
    assert first["comparison"]["mismatches"] == 48
    assert first["comparison"]["worst"] == list(report.first.comparison.worst)
    assert found["missing"] == []


def test_json_of_non_finite_numbers():
    assert as_json((float("nan"), float("inf"), -float("inf"), np.float64(1.5), 1 + 2j)) == [
        "NaN", "Infinity", "-Infinity", 1.5, "(1+2j)",
    ]  # fmt: skip


def test_ignores_variables_that_differ_in_every_job(tmp_path):
    for side, number in (("a", "1"), ("b", "2")):
        (tmp_path / side).mkdir()
        variables = {
            "TORCHELASTIC_ERROR_FILE": f"/tmp/{number}", "MASTER_PORT": number, "_": number,
            "SSH_CONNECTION": number, "OMP_NUM_THREADS": number,
        }  # fmt: skip
        found = json.dumps({"environment_variables": variables})
        (tmp_path / side / "runtime_info.json").write_text(found)
    found = provenance_diff(tmp_path / "a", tmp_path / "b")
    assert found == {"environment": ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"})}


def test_text_names_records_of_one_run_only(write):
    a = write([(f"old.{i}", "Activation", 0, np.ones(2)) for i in range(7)])
    b = write([("new.0", "Activation", 0, np.ones(2))])
    text = str(tap.compare(a, b))
    assert "7 only in the first, 1 only in the second" in text
    assert re.search(r"old\.3 +Activation +1 +step 0 +0 +only in the first", text)
    assert "mapping=" in text
    text = str(tap.compare(b, a, mapping=["new=old"]))
    assert "6 only in the second" in text
    assert "mapping=" not in text
