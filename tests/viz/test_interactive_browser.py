"""The widgets of `viz.interactive` in a real browser.

Plotly's JavaScript draws their state, and its click messages go back to Python, as in a notebook.
"""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import threading
from pathlib import Path

import plotly
import pytest
from ipywidgets.widgets.widget import _remove_buffers
from playwright.sync_api import sync_playwright

from tensortap import viz
from tests.viz.conftest import HOSTILE

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
BUNDLE = Path(plotly.__file__).parent / "package_data" / "widgetbundle.js"
PAGE = """<!doctype html><link rel="icon" href="data:,">
<div id="figure" style="width:900px"></div><div id="loss" style="width:900px"></div>
<script type="module">
import widget from "./widgetbundle.js";
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


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def address(tmp_path):
    shutil.copy(BUNDLE, tmp_path)
    (tmp_path / "index.html").write_text(PAGE)
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def click(tab, name, across, down):
    area = tab.locator(f"#{name} .nsewdrag").first.bounding_box()
    tab.mouse.move(area["x"] + area["width"] * across, area["y"] + area["height"] * down)
    tab.wait_for_selector(f"#{name} .hoverlayer text", timeout=60_000)
    tab.mouse.down()
    tab.mouse.up()
    message = "sent.findLast(([n, _, value]) => n === %s && value?.event_type === 'plotly_click')"
    return tab.wait_for_function(message % json.dumps(name), timeout=60_000).json_value()[2]


@pytest.mark.slow
def test_clicks_open_a_layer_and_choose_a_step(run_path, tmp_path, address):
    assert CHROMIUM, "the tests of pages need chromium: apt-get install chromium"
    shown = viz.interactive(viz.scalar_global_heatmap, run_path, tt="Activation")
    widgets = {"figure": shown.figure, "loss": shown.loss}
    states = {name: _remove_buffers(each.get_state())[0] for name, each in widgets.items()}
    (tmp_path / "state.json").write_text(json.dumps(states, default=str, allow_nan=False))
    logged = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1000, "height": 900})
        tab.on("pageerror", lambda error: logged.append(str(error)))
        tab.on("console", lambda message: logged.append(message.text))
        tab.goto(address)
        for name in widgets:
            tab.wait_for_selector(f"#{name} .nsewdrag", timeout=60_000)
        cell = click(tab, "figure", 0.4, 0.7)  # the fourth of five layers
        curve = click(tab, "loss", 0.5, 0.5)
        browser.close()
    assert logged == []
    shown.figure._js2py_pointsCallback = cell
    names, step = shown.detail.layout.meta["names"], shown.detail.layout.meta["step"]
    assert (list(names), step) == ([HOSTILE], cell["points"]["xs"][0])
    assert shown.step.value == step
    shown.loss._js2py_pointsCallback = curve
    assert shown.step.value == curve["points"]["xs"][0] != step
