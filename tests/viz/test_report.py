"""`tensortap report`: one file, whole, safe, and drawn by a real browser."""

from __future__ import annotations

import json
import re
import shutil
import sys
from html.parser import HTMLParser

import pytest
from playwright.sync_api import sync_playwright
from typer.testing import CliRunner

import tensortap as tap
from tensortap import viz
from tensortap.cli.main import app
from tensortap.record import Kind, Record
from tensortap.viz.reports import render
from tests.viz.conftest import HOSTILE, LAYERS, training

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


class Words(HTMLParser):
    """The text of a page, and its tags."""

    def __init__(self):
        super().__init__()
        self.texts, self.tags, self._quiet = [], [], False

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._quiet = tag in ("script", "style")

    def handle_endtag(self, tag):
        self._quiet = False

    def handle_data(self, data):
        if not self._quiet:
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def read(page):
    words = Words()
    words.feed(page)
    return words


def data_of(page):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1])


@pytest.fixture(scope="module")
def page(run_path):
    return render(run_path)


def test_what_is_in_it(page, run_path):
    words = read(page)
    assert f"run {run_path}" in words.text
    for said in (
        "1 alert", "tensors not finite 2", "The first alert blocks.0.down", "3 NaN", "Overview",
        "The most notable layers", "What low precision would lose", "Alerts", "What ran",
        "no provenance",
    ):  # fmt: skip
        assert said in words.text, said
    figures = data_of(page)["figures"]
    drawn = [
        attributes["id"]
        for tag, attributes in words.tags
        if "figure" in attributes.get("class", "")
    ]
    assert drawn == list(figures)
    assert len(drawn) == 7  # the loss, and of both kinds an overview, lines and exponents


def test_nothing_in_it_is_markup_that_a_name_brought(page):
    words = read(page)
    assert HOSTILE in words.text
    assert not [tag for tag, _ in words.tags if tag in ("b", "img", "iframe")]
    scripts = [attributes for tag, attributes in words.tags if tag == "script"]
    assert len(scripts) == 3
    assert not any("src" in attributes for attributes in scripts)


@pytest.fixture(scope="module")
def browser():
    assert CHROMIUM, "the tests of pages need chromium: apt-get install chromium"
    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_it_without_a_word(page, tmp_path, browser, scheme):
    path = tmp_path / "report.html"
    path.write_text(page)
    tab = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme=scheme)
    said, asked = [], []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(path.as_uri())
    tab.wait_for_selector("#figure0 .main-svg", timeout=60_000)
    overview = tab.locator("section", has_text="Overview")
    overview.get_by_role("button", name="Gradient").click()
    overview.locator(".pane:not([hidden]) .main-svg").first.wait_for(timeout=60_000)
    background = tab.evaluate(
        "getComputedStyle(document.querySelector('#figure0 .main-svg')).backgroundColor"
    )
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(23, 27, 34)"}[scheme]
    labels = tab.evaluate(
        "[...document.querySelectorAll('.ytick text')].map(each => each.textContent)"
    )
    assert any("<b>bold" in label for label in labels)
    assert tab.title() != "owned"
    assert said == []
    assert not [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]
    tab.close()


def test_the_command(run_path, tmp_path):
    out = tmp_path / "out.html"
    done = CliRunner().invoke(app, ["report", str(run_path), str(out)])
    assert done.exit_code == 0, done.output
    assert "the report is in" in done.output
    assert read(out.read_text()).text.count("Overview") == 1
    nothing = CliRunner().invoke(app, ["report", str(tmp_path), str(out)])
    assert nothing.exit_code != 0
    assert "is no run" in str(nothing.exception)


def test_an_empty_run(writer, tmp_path):
    words = read(viz.report(writer.path, tmp_path / "x.html").read_text())
    assert "an empty run" in words.text
    assert "This run is empty: tap.track() takes them." in words.text


def test_a_run_without_statistics(writer):
    writer.write([Record("x", Kind.VALUE, s, 0, s, 0, 1, s, value=float(s)) for s in range(3)])
    words = read(render(tap.open(writer.path)))
    assert "no alerts" in words.text
    assert "This run holds no statistics" in words.text


def test_what_is_missing_is_said(writer):
    writer.write(training(range(2)))
    writer.stores[0].missed("<i>gone</i>", Kind.ACTIVATION, 1, 0)
    writer.write(training(range(2, 3)))
    writer.close()
    text = read(render(writer.path)).text
    assert "1 values found no room" in text
    assert "<i>gone</i>" in text


def test_a_session_or_a_logframe(run_path):
    for source in (training(), tap.open(run_path).logframe()):
        text = read(render(source)).text
        assert "The most notable layers" in text
        assert all(layer in text for layer in LAYERS[3:])
        assert "What ran" not in text


def test_what_ran_and_what_was_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORTAP_SERVER", "127.0.0.1:1")
    run = tap.init(tmp_path)
    tap.finish()
    (run / "project.patch").write_text("diff --git a/x b/x\n+<script>1</script>\n")
    (run / "git_info.json").write_text(
        json.dumps({"project_git_info": {"commit_id": "abc", "status": "dirty"},
                    "runtime_modifications": {"torch.add": {"now": "<x>"}}})
    )  # fmt: skip
    text = read(render(run)).text
    for said in ("commit abc", "project.patch: 1 changed file", "+<script>1</script>", "torch.add",
                 f"tensortap reproduce {run}", "packages"):  # fmt: skip
        assert said in text, said


def test_without_plotly(run_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(tap.TensortapError, match=r"tensortap\[view\]"):
        render(run_path)
