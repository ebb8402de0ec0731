"""The report of a run: one complete and safe HTML file that a real browser draws."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

import tensortap as tap
from tensortap.alerts import Alert, record_of
from tensortap.cli.main import app
from tensortap.core.record import Kind, Record
from tensortap.rooms import figures as viz
from tensortap.rooms.report.run_report import report_html
from tensortap.runs.init import current
from tests.figures.conftest import HOSTILE, run_path, training, writer  # noqa: F401 - fixtures


class PageReader(HTMLParser):
    """Collects the text and the tags of a page."""

    def __init__(self, page):
        super().__init__()
        self.texts, self.tags, self._hidden = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._hidden = tag in ("script", "style")

    def handle_endtag(self, tag):
        self._hidden = False

    def handle_data(self, data):
        if not self._hidden:
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def text_of(source):
    return PageReader(report_html(source)).text


@pytest.fixture(scope="module")
def page(run_path):  # noqa: F811
    return report_html(run_path)


def test_contains_every_section_and_figure(page, run_path):  # noqa: F811
    found = PageReader(page)
    assert f"run {run_path}" in found.text
    for words in (
        "1 alert", "tensors with NaN or Inf 2", "First alert blocks.0.down", "3 NaN", "Overview",
        "Most notable layers", "Alerts", "Provenance", "no provenance",
    ):  # fmt: skip
        assert words in found.text, words
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    figures = [
        attributes["id"] for _, attributes in found.tags if attributes.get("class") == "figure"
    ]
    assert figures == list(json.loads(data[1])["figures"])
    assert len(figures) == 7  # the loss; an overview, lines and exponents of both kinds


def test_names_never_become_markup():
    alert = Alert("nan", HOSTILE, Kind.ACTIVATION, 1, 0, HOSTILE, HOSTILE)
    found = PageReader(report_html([*training(), record_of(alert, seq=999, time_ns=1)]))
    assert HOSTILE in found.text
    assert not [tag for tag, _ in found.tags if tag in ("b", "img", "iframe")]
    scripts = [attributes for tag, attributes in found.tags if tag == "script"]
    assert len(scripts) == 3
    assert not any("src" in attributes for attributes in scripts)


def test_command_writes_a_report(run_path, tmp_path):  # noqa: F811
    out = tmp_path / "out.html"
    done = CliRunner().invoke(app, ["report", str(run_path), str(out)])
    assert done.exit_code == 0, done.output
    assert "wrote the report to" in done.output
    assert PageReader(out.read_text()).text.count("Overview") == 1
    nothing = CliRunner().invoke(app, ["report", str(tmp_path), str(out)])
    assert nothing.exit_code != 0
    assert "is not a run" in str(nothing.exception)


def test_reports_an_empty_run(writer, tmp_path):  # noqa: F811
    page = viz.report(writer.path, tmp_path / "x.html").read_text()
    assert "Empty run" in PageReader(page).text
    assert "This run is empty. tap.track() records statistics." in PageReader(page).text


def test_reports_a_run_without_statistics(writer):  # noqa: F811
    writer.write([Record("x", Kind.VALUE, s, 0, s, 0, 1, s, value=float(s)) for s in range(3)])
    text = text_of(tap.open(writer.path))
    assert "No alerts" in text
    assert "This run has no statistics" in text


def test_reports_dropped_records(writer):  # noqa: F811
    writer.write(training(range(2)))
    writer.stores[0].note_dropped("<i>x</i>", Kind.ACTIVATION, 1, 0)
    writer.write(training(range(2, 3)))
    writer.close()
    text = text_of(writer.path)
    assert "1 record dropped over budget." in text
    assert "<i>x</i>" in text


def test_reports_records_and_logframes(run_path):  # noqa: F811
    for source in (training(), tap.open(run_path).logframe()):
        text = text_of(source)
        assert "Most notable layers" in text
        assert "tensors with NaN or Inf 2" in text
        assert "Provenance" not in text


@pytest.mark.slow
def test_reports_provenance(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORTAP_SERVER", "127.0.0.1:1")
    run = tap.init(tmp_path)
    assert current().keepers[0].update_now(60)
    tap.finish()
    (run / "project.patch").write_text("diff --git a/x b/x\n+<script>1</script>\n")
    (run / "git_info.json").write_text(
        json.dumps({"project_git_info": {"commit_id": "abc", "status": "dirty"},
                    "runtime_modifications": {"torch.add": {"now": "<x>"}}})
    )  # fmt: skip
    text = text_of(run)
    for words in ("commit abc", "project.patch: 1 changed file", "+<script>1</script>", "torch.add",
                  f"tensortap reproduce {run}", "Packages:"):  # fmt: skip
        assert words in text, words


def test_names_the_extra_when_plotly_is_missing(run_path, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(tap.TensortapError, match=r"pip install .*plotly"):
        report_html(run_path)
