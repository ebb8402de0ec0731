"""The HTML report is complete, safe, small, and works in a real browser."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest

from tensortap.rooms.compare import html
from tensortap.rooms.compare.report import CompareReport, Difference, Key, Missing
from tensortap.rooms.compare.result import Comparison
from tensortap.rooms.compare.runs import compare_runs
from tensortap.stats import summarize_array

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>'\"&😀\u2028"


def layers(change=lambda name, step, x: x, names=("embed", HOSTILE, "mlp"), steps=4, ranks=2):
    found = []
    for rank in range(ranks):
        rng = np.random.default_rng(rank)
        for step in range(steps):
            for name in names:
                x = rng.standard_normal((100, 70)).astype("f4")
                found.append((name, "Activation", step, change(name, step, x), rank))
    return found


@pytest.fixture
def report(write):
    def broken(name, step, x):
        return x * 2 if (name, step >= 2) == (HOSTILE, True) else x

    extra = ("extra", "Weight", 1, np.ones(3))
    return compare_runs(write([*layers(broken), extra]), write(layers()))


# -- what is in the file -------------------------------------------------------------------


def test_timeline(report):
    found = html.timeline_of(report)
    assert [name for name, _ in found.rows] == ["embed", HOSTILE, "mlp", "extra"]
    assert found.states[0].tolist() == [html.SAME] * 4
    assert found.states[1].tolist() == [html.SAME] * 2 + [html.DIFFERS] * 2
    assert found.sizes[1, 2:] == pytest.approx(1)  # the difference is as large as the value
    assert found.states[3].tolist() == [html.NONE, html.ONLY_A, html.NONE, html.NONE]


def test_page(report):
    page = html.render(report)
    assert "✗ The runs differ" in page
    for name, count in (("compared", 24), ("differ", 4), ("only in the first", 1)):
        assert f"<dt>{name}</dt><dd>{count}</dd>" in page
    first = re.search(r'<section id="first">(.*?)</section>', page, re.DOTALL)[1]
    assert "Activation  step 2  rank 0" in first
    assert "a is 2 times b" in first
    assert page.count('<details data-at="figure0:1,') == 4
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert len(data["figures"]) == 1  # the timeline


@pytest.mark.attack("script in names")
def test_escapes_names(report):
    page = html.render(report)
    scripts, others = [], []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            (scripts if tag == "script" else others).append((tag, dict(attrs)))

    Reader().feed(page)
    assert len(scripts) == 3  # data, plotly, and the script of reports
    assert not [tag for tag, _ in others if tag in ("img", "iframe", "object", "link")]
    assert not [a for _, attrs in others for a in attrs if a in ("src", "href") or a[:2] == "on"]
    assert "owned" in page  # it is there, as text
    assert "</script><script>document" not in page


def test_writes_lone_surrogates(tmp_path):
    key = Key("\ud800x", "Value", 0, 0, 0)
    report = CompareReport("a", "b", 1, 0, 0, (Difference(key, Comparison(False, "\udfff")),))
    path = report.write_html(tmp_path / "report.html")
    assert "?x" in path.read_text(encoding="utf-8")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.slow
def test_size_of_a_large_report_is_bounded():
    names = [f"blocks.{i // 10}.part.{i % 10}" for i in range(500)]
    worst = {(n, "Activation", s): 1e-6 for s in range(600) for n in names}
    comparison = Comparison(False, "1 of 4 elements", count=4, mismatches=1, rel_l2=1.2e-2)
    last = Key(names[-1], "Activation", 599, 0, 0)
    differences = [
        Difference(Key(name, "Activation", step, 0, 0), comparison)
        for step in range(300, 320)
        for name in names[::8]
    ]
    missing = tuple(Missing(Key(f"m{i}", "Weight", i, 0, 0), "b") for i in range(200))
    report = CompareReport(
        "a", "b", len(worst), 0, 0, (*differences, Difference(last, comparison)), missing,
        sizes=lambda: worst,
    )  # fmt: skip
    found = html.timeline_of(report)
    assert found.states.shape == (400, 300)
    assert found.left_out == 700 - 400
    # no row that differs is left out, and no difference is lost among its neighbors
    assert set(names[::8]) | {names[-1]} <= {name for name, _ in found.rows}
    assert found.states[found.row_of[names[-1], "Activation"]].max() == html.DIFFERS
    page = html.render(report)
    empty = html.render(CompareReport("a", "b", 0, 0, 0))
    assert len(page) - len(empty) < 5_000_000
    assert page.count("<details data-at") == 200
    assert "The first 200 of 1,261" in page


def test_statistics_that_differ_in_nan_get_the_strongest_color(write):
    x = np.arange(1.0, 9.0)
    broken = np.where(x == 3, np.nan, x)
    one = write([("a", "Activation", 0, summarize_array(x))])
    two = write([("a", "Activation", 0, summarize_array(broken))])
    report = compare_runs(one, two)
    assert report.differences[0].comparison.nonfinite == 1
    assert html.timeline_of(report).sizes[0, 0] == np.inf
    assert compare_runs(one, two, atol=100.0).differences  # no figure measures a NaN


# -- in a browser --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium, which make test installs")
def test_browser_draws_and_opens_a_clicked_cell(report, tmp_path):
    from playwright.sync_api import sync_playwright

    said = []
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = browser.new_page()
        page.set_default_timeout(120_000)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(report.write_html(tmp_path / "report.html").as_uri())
        page.locator("#figure0 .hm").first.wait_for()
        # cells that are the same, that only A has, that differ
        assert page.locator("#figure0 .hm").count() == 3
        page.evaluate(
            """document.getElementById("figure0").emit(
                "plotly_click", { points: [{ pointNumber: [1, 3] }] })"""
        )
        opened = page.locator("details[open]")
        assert "step 3 rank 0" in opened.locator("summary").inner_text()
        assert page.title() == "differ · tensortap compare"
        browser.close()
    assert not said, said  # an error of a script, or something that was to be fetched
