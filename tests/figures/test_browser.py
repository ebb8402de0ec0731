"""Figures in a real browser: the widgets of `viz.interactive`, and the report of a run.

For widgets, plotly's JavaScript draws their state, and its click messages go back to Python, as in
a notebook.
"""

from __future__ import annotations

import json
import shutil

import pytest
from ipywidgets.widgets.widget import _remove_buffers
from playwright.sync_api import sync_playwright

from tensortap.rooms import figures as viz
from tensortap.rooms.figures import explorer
from tests.figures.conftest import HOSTILE
from tests.served import served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
PAGE = """<!doctype html><link rel="icon" href="data:,">
<div id="figure" style="width:900px"></div><div id="loss" style="width:900px"></div>
<script type="module">
import widget from "./widget.js";
import "./plotly.js";  // the widget that all figures share has it
const states = await (await fetch("state.json")).json();
window.sent = [];
for (const name of ["figure", "loss"]) {
  const state = states[name];
  const model = {
    get: (key) => state[key],
    set(key, value) { state[key] = value; window.sent.push([name, key, value]); },
    on() {}, off() {}, save_changes() {}, send() {},
  };
  const made = typeof widget === "function" ? await widget() : widget;
  const place = { model, el: document.getElementById(name), experimental: {} };
  if (made.initialize) await made.initialize(place);
  await made.render(place);
}
</script>"""


@pytest.fixture(scope="module")
def browser():
    assert CHROMIUM, "the tests of pages need chromium: apt-get install chromium"
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


def click(tab, name, across, down):
    area = tab.locator(f"#{name} .nsewdrag").first.bounding_box()
    tab.mouse.move(area["x"] + area["width"] * across, area["y"] + area["height"] * down)
    tab.wait_for_selector(f"#{name} .hoverlayer text", timeout=60_000)
    tab.mouse.down()
    tab.mouse.up()
    message = "sent.findLast(([n, _, value]) => n === %s && value?.event_type === 'plotly_click')"
    return tab.wait_for_function(message % json.dumps(name), timeout=60_000).json_value()[2]


@pytest.mark.slow
def test_clicks_open_a_layer_and_choose_a_step(run_path, tmp_path, browser):
    shown = viz.interactive(viz.scalar_global_heatmap, run_path, tt="Activation")
    widgets = {"figure": shown.figure, "loss": shown.loss}
    states = {name: _remove_buffers(each.get_state())[0] for name, each in widgets.items()}
    (script,) = explorer._shared_plotly()
    for name, each in (("widget.js", shown.figure), ("plotly.js", script)):
        (tmp_path / name).write_text(each._esm)
    (tmp_path / "index.html").write_text(PAGE)
    (tmp_path / "state.json").write_text(json.dumps(states, default=str, allow_nan=False))
    logged = []
    with served(tmp_path) as address:
        tab = browser.new_page(viewport={"width": 1000, "height": 900})
        tab.on("pageerror", lambda error: logged.append(str(error)))
        tab.on("console", lambda message: logged.append(message.text))
        tab.goto(address)
        for name in widgets:
            tab.wait_for_selector(f"#{name} .nsewdrag", timeout=60_000)
        cell = click(tab, "figure", 0.4, 0.7)  # the fourth of five layers
        curve = click(tab, "loss", 0.5, 0.5)
        tab.close()
    assert logged == []
    shown.figure._js2py_pointsCallback = cell
    names, step = shown.detail.layout.meta["names"], shown.detail.layout.meta["step"]
    assert (list(names), step) == ([HOSTILE], cell["points"]["xs"][0])
    assert shown.step.value == step
    shown.loss._js2py_pointsCallback = curve
    assert shown.step.value == curve["points"]["xs"][0] != step


@pytest.mark.slow
def test_report_is_drawn_in_both_color_schemes(run_path, tmp_path, browser):
    path = viz.report(run_path, tmp_path / "report.html")
    logged, requests = [], []
    background = "getComputedStyle(document.querySelector('#figure0 .main-svg')).backgroundColor"
    tab = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
    tab.on("console", lambda message: logged.append(message.text))
    tab.on("pageerror", lambda error: logged.append(str(error)))
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto(path.as_uri())
    tab.wait_for_selector("#figure0 .main-svg", timeout=60_000)
    overview = tab.locator("section", has_text="Overview")
    overview.get_by_role("button", name="Gradient").click()
    overview.locator(".pane:not([hidden]) .main-svg").first.wait_for(timeout=60_000)
    labels = tab.evaluate(
        "[...document.querySelectorAll('.ytick text')].map(each => each.textContent)"
    )
    assert any(label.endswith(HOSTILE[-20:]) for label in labels)
    assert tab.evaluate(background) == "rgb(255, 255, 255)"
    tab.emulate_media(color_scheme="dark")
    for _ in range(600):  # wait_for_function would need eval, which the page forbids
        if tab.evaluate(background) == "rgb(23, 27, 34)":
            break
        tab.wait_for_timeout(100)
    assert tab.evaluate(background) == "rgb(23, 27, 34)"
    assert tab.title() != "owned"
    tab.close()
    assert logged == []
    assert not [url for url in requests if not url.startswith(("file:", "data:", "blob:"))]
