"""The HTML report is complete, safe, small, and works in a real browser."""

from __future__ import annotations

import base64
import itertools
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensortap.compare import html
from tensortap.compare.report import CompareReport, Difference, Key, Missing
from tensortap.compare.result import Comparison
from tensortap.compare.rules import parse_rules
from tensortap.compare.runs import compare_runs
from tensortap.stats import summarize_array

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>'\"&😀\u2028"


def data_of(page):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1])


def cells_of(data):
    raw = np.frombuffer(base64.b64decode(data["cells"]), np.uint8)
    return raw.reshape(len(data["names"]), len(data["steps"]))


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


def test_page_data(report):
    data = data_of(html.render(report))
    assert data["agree"] is False
    assert data["counts"]["compared"] == 24
    assert (data["counts"]["differ"], data["counts"]["only_a"]) == (4, 1)
    assert data["names"] == ["embed", HOSTILE, "mlp", "extra"]
    cells = cells_of(data)
    assert cells[0].tolist() == [html.SAME] * 4
    assert cells[1, :2].tolist() == [html.SAME] * 2
    level = round(99 * (0 - -8) / 9)  # the difference is as large as the value
    assert cells[1, 2:].tolist() == [html.DIFFERS + level] * 2
    assert cells[3].tolist() == [0, html.ONLY_A, 0, 0]
    first = data["differences"][data["first"]]
    assert (first["name"], first["step"], first["rank"]) == (HOSTILE, 2, 0)
    assert first["why"] == ["a is 2 times b"]
    assert set(data["pictures"]) == {"0", "1", "2", "3"}


@pytest.mark.attack("script in names")
def test_escapes_names(report):
    page = html.render(report)
    scripts, others = [], []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            (scripts if tag == "script" else others).append((tag, dict(attrs)))

    Reader().feed(page)
    assert len(scripts) == 2
    assert not [tag for tag, _ in others if tag in ("img", "iframe", "object", "link")]
    assert not [a for _, attrs in others for a in attrs if a in ("src", "href") or a[:2] == "on"]
    assert "owned" in page  # it is there, as text
    assert "</script><script>document" not in page


def test_page_fetches_nothing():
    page = html.render(CompareReport("a", "b", 0, 0, 0))
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttp|innerHTML", page)


def test_writes_lone_surrogates(tmp_path):
    key = Key("\ud800x", "Value", 0, 0, 0)
    report = CompareReport("a", "b", 1, 0, 0, (Difference(key, Comparison(False, "\udfff")),))
    path = report.write_html(tmp_path / "report.html")
    assert data_of(path.read_text(encoding="utf-8"))["names"] == ["?x"]
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.slow
def test_size_of_a_large_report_is_bounded(tmp_path):
    rng = np.random.default_rng(0)
    names = [f"blocks.{i // 10}.part.{i % 10}" for i in range(4000)]
    random = iter((rng.random(340 * len(names)) * 1e-6).tolist())
    worst = {(n, "Activation", s): next(random) for s in range(340) for n in names}
    comparison = Comparison(
        False, "1 of 4 elements", count=4, mismatches=1, max_abs=1.23456789e-3, mean_abs=1.2345e-4,
        max_rel=float("inf"), rel_l2=1.234567e-2, cosine=0.999912345678, worst=(1, 2, 3),
        values=(1.2345678, 2.3456789), passing_atol=1.2345678e-3, shapes=((9, 9), (9, 9)),
        dtypes=("float32", "float32"),
    )  # fmt: skip
    last = Key(names[-1], "Activation", 339, 0, 0)
    differences = [
        Difference(Key(name, "Activation", step, 0, 0), comparison)
        for step in range(300, 320)
        for name in names[::8]
    ]
    missing = tuple(Missing(Key(f"m{i}", "Weight", i, 0, 0), "b") for i in range(500))
    report = CompareReport(
        "a", "b", len(worst), 0, 0, (*differences, Difference(last, comparison)), missing,
        sizes=lambda: worst,
    )  # fmt: skip
    page = html.render(report)
    assert len(page.encode()) < 5_000_000
    data = data_of(page)
    cells = cells_of(data)
    assert cells.size <= 1_000_000 + 3000
    assert data["bucket"] > 1
    assert len(data["differences"]) == 2000
    assert data["left_out"] == 4500 - 3000
    # no row that differs is left out, and no difference is lost among its neighbours
    assert set(names[::8]) | {names[-1]} <= set(data["names"])
    assert cells[data["names"].index(names[-1])].max() >= html.DIFFERS


def test_page_always_has_the_first_unexpected_difference():
    found = Comparison(False, "1 of 4 elements", count=4, mismatches=1, rel_l2=0.1)
    many = [Difference(Key("a", "Value", n, 0, 0), found, expected="so") for n in range(2500)]
    last = Difference(Key("b", "Value", 9999, 0, 0), found)
    data = data_of(html.render(CompareReport("a", "b", 2501, 0, 0, (*many, last))))
    assert data["differences"][data["first"]]["name"] == "b"


# -- pictures ------------------------------------------------------------------------------


def decoded(picture, scale):
    raw = np.frombuffer(base64.b64decode(picture["cells"]), np.int8).astype(float)
    raw[raw == -128] = np.nan
    return raw.reshape(picture["rows"], picture["columns"]) / 127 * scale


def test_statistics_that_differ_in_nan_get_the_strongest_color(write):
    x = np.arange(1.0, 9.0)
    broken = np.where(x == 3, np.nan, x)
    one = write([("a", "Activation", 0, summarize_array(x))])
    two = write([("a", "Activation", 0, summarize_array(broken))])
    report = compare_runs(one, two)
    assert report.differences[0].comparison.nonfinite == 1
    found = data_of(html.render(report))
    assert cells_of(found)[0, 0] == html.DIFFERS + 100
    assert found["differences"][0]["level"] == 100
    rules = parse_rules('[[rule]]\npass = "max_abs <= 100"')
    assert compare_runs(one, two, rules=rules).differences  # no figure measures a NaN


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 90), min_size=0, max_size=3),
    st.sampled_from(["f4", "f8", "f2", "i8", "u1", "?", "c8", "bfloat16"]),
    st.integers(0, 10),
)
def test_picture_keeps_the_extreme_of_every_block(shape, dtype, seed):
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    x = (np.random.default_rng(seed).standard_normal(shape) * 50).astype(kind)
    found = html.shrink(np.asarray(x))
    rows, columns = html.flattened(x.shape)
    assert rows * columns == x.size
    assert found.shape == (min(64, rows), min(64, columns))
    flat = np.abs(x) if dtype == "c8" else x.astype(np.float64)
    flat = np.asarray(flat, np.float64).reshape(rows, columns)
    for i, part in enumerate(blocks(rows)):
        for j, across in enumerate(blocks(columns)):
            block = flat[part, across]
            assert abs(found[i, j]) == np.abs(block).max()
            assert found[i, j] in block


def blocks(size):
    edges = [size * i // min(64, size) for i in range(min(64, size) + 1)]
    return [slice(*pair) for pair in itertools.pairwise(edges)]


def test_picture_is_independent_of_chunks(monkeypatch):
    x = np.random.default_rng(0).standard_normal((130, 999))
    whole = html.shrink(x, x.round(1))
    monkeypatch.setattr(html, "_AT_ONCE", 100)
    assert np.array_equal(whole, html.shrink(x, x.round(1)))


def test_pictures_of_non_finite_values():
    a = np.array([[1.0, np.nan, np.inf, np.inf]])
    b = np.array([[1.0, np.nan, np.inf, -np.inf]])
    found = html.pictures_of(a, b)
    assert np.array_equal(
        decoded(found["a"], found["scale"]), [[1, np.nan, np.nan, np.nan]], equal_nan=True
    )
    assert np.array_equal(
        decoded(found["d"], found["scale_d"]), [[0, 0, 0, np.nan]], equal_nan=True
    )


def test_small_difference_is_not_drawn_as_zero():
    found = html.pictures_of(np.array([1e-9, 1.0]), np.zeros(2))
    assert decoded(found["d"], 127).tolist() == [[1, 127]]


def test_values_without_picture():
    assert html.pictures_of("text", "other") is None
    assert html.pictures_of(np.array(["a"]), np.array(["b"])) is None
    assert html.pictures_of(np.empty((0, 3)), np.empty((0, 3))) is None
    assert "d" not in html.pictures_of(np.ones(3), np.ones(4))


# -- in a browser --------------------------------------------------------------------------


def browse(tmp_path, page, fragment=""):
    """The page after its script has run."""
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-sync",
            "--disable-background-networking", "--disable-component-update",
            "--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=3000", "--enable-logging=stderr", "--window-size=1400,1000",
            "--dump-dom", page.as_uri() + fragment,
        ],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said  # an error of the script, or something that was to be fetched
    body = done.stdout.split('<script type="application/json"')[0]
    return re.sub(r"<style>.*?</style>", "", body, flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium, which make test installs")
def test_browser_opens_a_detail(report, tmp_path):
    page = report.write_html(tmp_path / "report.html")
    found = browse(tmp_path, page, "#d=2")
    assert "<title>differ · tensortap compare</title>" in found
    assert "✗ The runs differ" in found
    detail = found[found.index('<aside id="detail"') :]
    detail = detail[: detail.index("</aside>")]
    assert "difference 3 of 4" in detail
    assert "step 3 · rank 0" in detail
    assert "differing elements" in detail
    assert detail.count("<canvas") == 3
    assert "&lt;/script&gt;&lt;script&gt;document.title='owned'" in detail
    assert "<img" not in found
    assert "a is 2 times b" in found
    assert "only in the first" in found


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium, which make test installs")
def test_browser_opens_a_report_without_differences(write, tmp_path):
    report = compare_runs(write(layers()), write(layers()))
    found = browse(tmp_path, report.write_html(tmp_path / "report.html"))
    assert "✓ The runs agree" in found
    assert "Nothing differs" in found
    assert '<section id="list" hidden' in found


CLICKS = """<script>
const by = (text) => [...document.querySelectorAll("button")].find((b) => b.textContent === text);
const listed = () => [...document.querySelectorAll("#list tbody tr")];
const rows = () => listed().map((row) => row.cells[1].textContent);
const told = {before: rows()};
const rank = document.querySelector("#filters select");
rank.value = "1"; rank.dispatchEvent(new Event("change"));
told.of_rank_1 = rows();
document.querySelector("#list tbody tr").click();
told.opened = document.querySelector("#detail h3 + .dim").textContent;
told.hash = location.hash;
by("→").click();
told.next = document.querySelector("#detail h3 + .dim").textContent;
by("Activation").click();
told.without_kind = rows();
by("Activation").click();
const canvas = document.getElementById("cells"), box = canvas.getBoundingClientRect();
const at = {clientX: box.left + box.width / 2, clientY: box.top + 32};
canvas.dispatchEvent(new MouseEvent("mousemove", at));
told.tip = document.getElementById("tip").textContent;
const out = document.createElement("pre");
out.id = "told"; out.textContent = JSON.stringify(told);
document.body.prepend(out);
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium, which make test installs")
def test_browser_filters_and_opens_a_clicked_cell(report, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(html.render(report) + CLICKS, encoding="utf-8")
    found = browse(tmp_path, page)
    told = json.loads(re.search(r'<pre id="told">(.*?)</pre>', found, re.DOTALL)[1])
    assert told["before"] == ["0", "1", "0", "1"]
    assert told["of_rank_1"] == ["1", "1"]
    assert told["opened"] == "Activation · step 2 · rank 1"
    assert told["hash"] == "#d=1"
    assert told["next"] == "Activation · step 3 · rank 1"
    assert told["without_kind"] == []
    assert told["tip"].startswith("embed · Activation")
