"""Explanations of alerts: `tensortap why`, the report, and hostile texts in both."""

from __future__ import annotations

import json

import pytest
import torch

import tensortap as tap
from tensortap.alerts.alert import Alert, record_of
from tensortap.capture.pipeline import pipeline
from tensortap.core.record import Kind
from tensortap.rooms.ops.explanation import ChainLink, Operand, OperationExplanation
from tensortap.rooms.ops.why import why_text
from tensortap.rooms.report.run_report import report_html
from tests.commands import type_in
from tests.figures.conftest import HOSTILE
from tests.report.test_report import PageReader

ESCAPE = "\x1b[2J\x07\r\n" + HOSTILE


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with one bad division."""
    path = tap.init(tmp_path_factory.mktemp("runs"))
    with tap.ops(torch.nn.Linear(2, 2)):
        x = torch.tensor([[1.0, 0.0], [2.0, 4.0]])
        x.abs() / x.sum(0).sub(4)
    tap.finish()
    return path


def hostile_explanation():
    return OperationExplanation(
        ESCAPE, ESCAPE, ESCAPE, ESCAPE, ESCAPE, ESCAPE, 7, ESCAPE, 6, (ESCAPE,) * 3,
        (Operand(ESCAPE, ESCAPE),), (ChainLink(ESCAPE, ESCAPE, ESCAPE, ESCAPE, ESCAPE),),
    )  # fmt: skip


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory):
    path = tap.init(tmp_path_factory.mktemp("runs"))
    alert = Alert("why", ESCAPE, Kind.OP, 3, 0, ESCAPE, ESCAPE, explanation=hostile_explanation())
    pipeline.put(record_of(alert, seq=0, time_ns=0))
    tap.finish()
    return path


def test_command_prints_everything(run):
    code, out, error = type_in("why", run)
    assert (code, error) == (0, "")
    for words in (
        "step 0: div at ", "0/0: 1 element of the denominator is 0", f"{__file__}:", " in run\n",
        "x.abs() / x.sum(0).sub(4)\n", "  self    [2, 2] f32 x∈[0 4]", "  other   [2] f32 x∈[-1 0]",
        "  output  [2, 2] f32 x∈[-2 -1]", "NaN 1! +Inf 1!", "what led there", "run:1:sum  [2] f32",
    ):  # fmt: skip
        assert words in out, words


def test_command_prints_json(run):
    code, out, _ = type_in("why", run, "--json")
    assert code == 0
    assert json.loads(out)["explanation"]["operation"] == "div"


def test_command_says_what_to_do_without_a_verdict(run, tmp_path):
    path = tap.init(tmp_path)
    tap.finish()
    code, out, error = type_in("why", path)
    assert (code, out) == (1, "")
    assert "there is no verdict. Wrap the step function: step = tap.blackbox(" in error
    code, out, error = type_in("why", run, "--step", 7)
    assert code == 2
    assert "verdicts are of steps 0" in error


def test_terminal_gets_no_control_characters(hostile_run):
    code, out, _ = type_in("why", hostile_run)
    assert code == 0
    assert HOSTILE in out
    assert not [c for c in out if not c.isprintable() and c != "\n"]


def test_verdicts_without_an_operation_are_their_paragraph():
    alert = Alert("why", "blackbox", Kind.OP, 3, 0, "", "step 3: transient.")
    assert why_text(alert).plain == "step 3: transient.\n"


def test_report_shows_the_verdict(run):
    text = PageReader(report_html(run)).text
    for words in ("Why", "0/0: 1 element", "x.abs() / x.sum(0).sub(4)", "NaN 1! +Inf 1!",
                  "What led there"):  # fmt: skip
        assert words in text, words


def test_report_never_makes_markup_of_an_explanation(hostile_run):
    page = PageReader(report_html(hostile_run))
    assert HOSTILE in page.text
    assert not [tag for tag, _ in page.tags if tag in ("b", "img", "iframe")]
