"""The page in a real browser: every tab, live, by mouse and keyboard, offline."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
from playwright import sync_api as playwright

import tensortap as tap
from tensortap.stats import summarize_array
from tests.page.conftest import HOSTILE, LAYERS, STEPS, Writer, serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium, which make test installs"),
    pytest.mark.slow,
]
VIEWS = {
    "summary": "summary", "overview": "layers", "lines": "layers", "exponents": "exponents",
    "tensors": "tensors", "health": "problems", "alerts": "problems", "ranks": "ranks",
    "compare": "compare", "provenance": "run", "receipt": "run", "operations": "layers",
    "analyses": "problems", "probes": "layers", "compaction": "run",
    "align": "compare",
}  # fmt: skip
"""Each view, and the tab that shows it."""
# nothing of these runs is in them
UNUSED = ("ranks", "operations", "analyses", "probes", "compaction", "align")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
    "--disable-component-update",
]  # fmt: skip


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        # one context for all tests: plotly.js is loaded and compiled once
        context = browser.new_context(viewport={"width": 1280, "height": 800})
        context.set_default_timeout(200_000)
        yield context
        browser.close()


# the state of a page, for error messages
WHERE = """() => [location.hash, document.activeElement.outerHTML.slice(0, 60),
  document.body.dataset, document.getElementById("notice").innerText,
  document.querySelector("dialog").open,
  [...document.querySelectorAll(".panel")].map((p) => `${p.id} ${p.hidden}`)]"""


class Tab:
    """A browser on the page that records errors and requests to other servers."""

    def __init__(self, chromium, page, fragment=""):
        self.server = page
        self.page = chromium.new_page()
        self.errors, self.foreign_requests = [], []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(f"dialog {dialog.message}"))
        self.page.on("request", self._request)
        self.open_requests = set()
        for event in ("requestfinished", "requestfailed"):
            self.page.on(event, lambda request: self.open_requests.discard(request.url))
        self.page.goto(f"{page.url}{fragment}")
        self.ready()

    def _console(self, message):
        # the page shows responses with an error; the browser logs them as well
        if message.type in ("error", "warning") and "the server responded" not in message.text:
            self.errors.append(message.text)

    def _request(self, request):
        self.open_requests.add(request.url)
        own = (self.server.address, "data:", "blob:", self.server.address.replace("http", "ws"))
        if not request.url.startswith(own):
            self.foreign_requests.append(request.url)

    def ready(self):
        self.page.wait_for_selector("body[data-ready=yes]")
        self.page.wait_for_selector("body[data-push=open]")

    def open(self, tab):
        self.page.click(f"#tab-{VIEWS[tab]}")
        if self.page.locator(f"#panel-{tab}[hidden]").count():
            name = {"overview": "Heatmap"}.get(tab, tab.title())
            self.page.locator(f"#tabpanel-{VIEWS[tab]}").get_by_role("button", name=name).click()
        self.shown(tab)

    def shown(self, tab):
        try:
            self.page.wait_for_selector(f"[data-drawing=no] #panel-{tab}:not([hidden])")
        except playwright.TimeoutError as error:
            raise AssertionError(
                f"{tab} was not shown: {self.page.evaluate(WHERE)}, {self.open_requests}"
            ) from error

    def go(self, query):
        """Go to an address without loading the page anew; to the heatmap if it names no view."""
        query += "" if "tab=" in query else "&tab=overview"
        self.page.evaluate(
            """query => new Promise((done) => {
              addEventListener("popstate", () => setTimeout(done), { once: true });
              if (location.hash === "#" + query) done();
              location.hash = query;
            })""",
            query,
        )
        self.shown(dict(re.findall(r"(\w+)=([^&]*)", query))["tab"])

    def state(self):
        # the page delays writing its address, and does it now when it is left
        self.page.evaluate("dispatchEvent(new Event('pagehide'))")
        return dict(re.findall(r"[#&](\w+)=([^&]*)", self.page.evaluate("location.hash")))

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.page.close()
        if kind is None:
            self.check()

    def check(self):
        """Assert that there were no errors and no requests to other servers."""
        assert self.errors == []
        assert self.foreign_requests == []


@pytest.fixture(scope="module")
def shared_tab(chromium, page):
    with Tab(chromium, page) as tab:
        yield tab


@pytest.fixture
def visit(shared_tab):
    """A function that goes to an address of the shared page."""
    shared_tab.page.emulate_media(color_scheme="light")

    def go(query):
        shared_tab.go(query)
        return shared_tab

    yield go
    shared_tab.check()


def test_every_tab_has_content(visit):
    tab = visit("run=a")
    q = tab.page
    assert "token" not in q.url
    panels = q.locator("[id^=panel-]").evaluate_all("all => all.map((each) => each.id)")
    assert set(panels) == {f"panel-{name}" for name in VIEWS}
    for name, strip in VIEWS.items():
        if name in UNUSED:
            assert q.locator(f"#panel-{name}").is_hidden()
            continue
        tab.open(name)
        assert q.locator(f"#tab-{strip}").get_attribute("aria-selected") == "true"
        assert q.locator("#notice").is_hidden()
    tab.open("overview")
    assert q.locator("#panel-overview .heatmaplayer").count()
    tab.open("lines")
    assert q.locator("#panel-lines .scatterlayer .trace").count() >= 2
    tab.open("exponents")
    assert q.locator("#panel-exponents .barlayer").count()
    tab.open("tensors")
    assert q.locator("#panel-tensors .heatmaplayer").count()
    assert "[16, 24] float32" in q.locator("#panel-tensors").inner_text()
    tab.open("alerts")
    assert "blocks.1.mlp" in q.locator("#panel-alerts tbody").inner_text()
    assert q.locator("#tab-problems .badge").inner_text() == "1"
    tab.open("receipt")
    assert "Nothing was dropped" in q.locator("#panel-receipt").inner_text()


def test_opens_on_the_verdict(chromium, page):
    with Tab(chromium, page, "#run=a") as tab:
        q = tab.page
        tab.shown("summary")
        verdict = q.locator("#panel-summary .conclusion")
        assert verdict.locator(".light.problem").count() == 1
        assert "1 problem found, the first at step 20." in verdict.inner_text()
        assert "blocks.1.mlp Gradient: holds NaN It began in embed." in verdict.inner_text()
        facts = q.locator("#panel-summary .figures").inner_text().split("\n")
        assert dict(zip(facts[::2], facts[1::2], strict=True)) | {"duration": ""} == {
            "state": "ended", "steps": "30", "last step": "29", "duration": "", "loss": "0.1",
            "alerts": "1", "hints": "0",
        }  # fmt: skip
        cells = q.locator("#panel-summary .cells canvas")
        assert cells.evaluate("(canvas) => [canvas.width, canvas.height]") == [STEPS, len(LAYERS)]
        painted = "(canvas) => canvas.getContext('2d').getImageData(5, 2, 1, 1).data[3]"
        assert cells.evaluate(painted) == 255
        cells.hover(position={"x": 5, "y": 5})
        assert re.fullmatch(r"embed\nstep 0\nrm2 [\d.]+", cells.get_attribute("title"))
        verdict.get_by_role("button", name="Show the place").click()
        tab.shown("exponents")
        assert (tab.state()["name"], tab.state()["step"]) == ("blocks.1.mlp", "20")


def test_layers_are_drawn_before_plotly_is_there(chromium, page):
    q, held = chromium.new_page(), []
    q.route("**/plotly.js*", lambda route: held.append(route))
    q.goto(f"{page.url}#run=a&tab=overview")
    cells = q.locator("#panel-overview .cells canvas")
    assert cells.evaluate("(canvas) => [canvas.width, canvas.height]") == [STEPS, len(LAYERS)]
    q.wait_for_function("() => document.querySelector('script[src*=plotly]')")
    while not held:
        q.wait_for_timeout(10)
    held.pop().continue_()
    q.wait_for_selector("#panel-overview .heatmaplayer")
    assert not cells.count()
    q.close()


def test_a_link_to_a_missing_run_says_so(chromium, page):
    with Tab(chromium, page, "#run=missing") as tab:
        text = tab.page.locator("#nothing").inner_text()
        assert "no run 'missing' is shown here" in text
        assert tab.state()["run"] == "missing"


def test_the_list_of_runs_tells_them_apart_and_sorts(visit):
    tab = visit("run=killed&tab=summary")
    q, options = tab.page, tab.page.locator("#runs li")
    assert "crashed" in q.locator("#title").inner_text()
    assert "crashed" in q.locator("#panel-summary .figures").inner_text()
    row = options.filter(has_text="try a")
    row.filter(has_text="loss 0.1").filter(has_text="1 alert").wait_for()
    assert re.search(r"(now|ago) · .*s · loss 0\.1 · 1 alert", row.inner_text())
    assert "<b>not bold</b>" in row.get_attribute("title")
    assert row.locator(".pill").inner_text() == "ended"

    def names():
        return [each.split("\n")[0] for each in options.all_inner_texts()]

    assert names() == ["raw", "killed", "empty", "try b", "try a"]
    q.get_by_label("Sort the runs by").select_option("loss")
    q.wait_for_function("() => location.hash.includes('sort=loss')")
    assert names()[:3] == ["try b", "try a", "killed"]
    q.get_by_label("Sort the runs by").select_option("name")
    assert names() == ["empty", "killed", "raw", "try a", "try b"]


def test_heatmap_colors_are_relative_to_the_row(visit):
    tab = visit("run=a&kind=Gradient&tab=overview")
    q = tab.page
    z = "document.querySelector('#panel-overview .overview')._fullData[0].zmax"
    relative = q.evaluate(z)
    tools = q.locator("#panel-overview .modebar").bounding_box()
    legend = q.locator("#panel-overview .legend").first.bounding_box()
    assert legend["x"] + legend["width"] < tools["x"]
    chosen = q.locator("#panel-overview .segments [aria-pressed=true]")
    assert chosen.inner_text() == "Relative to the row"
    q.get_by_role("button", name="Absolute").click()
    q.wait_for_function(f"() => {z} !== {relative}")
    q.fill("#search", "attn")
    q.wait_for_function(
        "() => document.querySelector('#panel-overview .overview').layout.meta.layers.length === 2"
    )
    q.keyboard.press("Escape")
    tab.shown("overview")
    statistic = q.locator("#panel-overview").get_by_label("Statistic", exact=True)
    assert "RMS (rm2)" in statistic.inner_text()
    assert statistic.get_attribute("title") == "Root mean square: the typical size of the values"
    assert all(each.get_attribute("title") for each in q.locator("#tabs [role=tab]").all())


def test_states_of_the_optimizer_are_kinds_of_their_own(chromium, tmp_path):
    run = Writer(tmp_path, "r")
    for step in range(3):
        for state in ("exp_avg", "exp_avg_sq", "step"):
            for name in ("fc.weight", "head.weight"):
                x = np.full((4, 4), 1.0 + step, "f4")
                stats = summarize_array(x)
                run.put(f"{name}.{state}", "Optimiser_State", step, None, stats, "float32", (4, 4))
    run.close()
    with serving(tmp_path) as page, Tab(chromium, page, "#run=r&tab=overview") as tab:
        q = tab.page
        kinds = q.locator("#kind option").evaluate_all("all => all.map((each) => each.value)")
        assert kinds == [f"Optimiser_State.{each}" for each in ("exp_avg", "exp_avg_sq", "step")]
        rows = "document.querySelector('#panel-overview .overview').layout.meta.layers"
        for state in ("exp_avg_sq", "exp_avg"):
            q.select_option("#kind", f"Optimiser_State.{state}")
            q.wait_for_function(f"() => {rows}[0].endsWith('.{state}')")
            assert q.evaluate(rows) == [f"fc.weight.{state}", f"head.weight.{state}"]


def test_keys_are_shortcuts_again_after_enter(visit):
    tab = visit("run=a&tab=overview")
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("attn")
    tab.page.keyboard.press("Enter")
    tab.page.keyboard.press("3")
    tab.shown("exponents")
    assert tab.state()["q"] == "attn"


@pytest.mark.parametrize("width", [390, 1100])
def test_narrow_screens_have_a_drawer_and_a_strip_that_scrolls(chromium, page, width):
    with Tab(chromium, page, "#run=a") as tab:
        q = tab.page
        q.set_viewport_size({"width": width, "height": 600})
        for name, strip in VIEWS.items():
            if name in UNUSED:
                continue
            tab.open(name)
            assert q.locator(f"#tab-{strip}").bounding_box()["x"] >= 0
            assert q.evaluate("document.documentElement.scrollWidth") == width
            # what does not fit below each other scrolls: nothing is squeezed
            heights = "all => all.map((each) => each.scrollHeight - each.clientHeight)"
            assert not any(q.locator(".card:has(table):visible").evaluate_all(heights))
            if strip == "problems":  # every column is seen
                assert not any(
                    q.locator(f"#panel-{name} .card").evaluate_all(
                        "all => all.map((each) => each.scrollWidth - each.clientWidth)"
                    )
                )
            if name == "tensors":  # below each other, not squeezed beside each other
                plot = q.locator("#panel-tensors .tensor").bounding_box()
                assert plot["width"] > 0.6 * min(width, 900)
        names = q.get_by_role("treeitem", name="embed")
        assert not names.is_visible()
        q.get_by_role("button", name="Runs and names").click()
        names.wait_for()
        q.mouse.click(width - 5, 500)
        names.wait_for(state="hidden")


def test_a_cell_of_the_heatmap_opens_its_exponents(visit):
    tab = visit("run=a&kind=Gradient")
    q = tab.page
    q.evaluate("""() => {
      const plot = document.querySelector("#panel-overview .js-plotly-plot");
      const all = plot.data.find((t) => t.type === "heatmap");
      window.cell = plot.layout.meta.layers.indexOf("blocks.0.mlp");
    }""")
    box = q.locator("#panel-overview .overview .heatmaplayer image").first.bounding_box()
    row = q.evaluate("window.cell")
    q.mouse.click(
        box["x"] + box["width"] * (7 + 0.5) / STEPS,
        box["y"] + box["height"] * (row + 0.5) / len(LAYERS),
    )
    q.wait_for_selector("#tab-exponents[aria-selected=true]")
    tab.shown("exponents")
    state = tab.state()
    assert (state["name"], state["step"], state["kind"]) == ("blocks.0.mlp", "7", "Gradient")
    assert "blocks.0.mlp" in q.locator("#panel-exponents .js-plotly-plot").text_content()
    q.go_back()
    q.wait_for_selector("#tab-layers[aria-selected=true]")


def test_shows_the_value_under_the_mouse(visit, runs):
    wanted = tap.open(runs / "a").get("head", step=11, kind="Activation")
    tab = visit("run=a&tab=tensors&name=head&kind=Activation&step=11")
    q = tab.page
    box = q.locator("#panel-tensors .tensor .heatmaplayer image").first.bounding_box()
    row, column = 5, 17
    q.mouse.move(
        box["x"] + box["width"] * (column + 0.5) / 24,
        box["y"] + box["height"] * (row + 0.5) / 16,
    )
    text = q.locator(".tensor .hoverlayer text").first.text_content()
    place, _, value = text.partition("=")
    assert place.strip() == f"[{row}, {column}]"
    assert np.float32(value.strip().replace("−", "-")) == wanted[row, column]


def test_shows_one_nan_among_sixteen_million_values(visit):
    tab = visit("run=raw&tab=tensors&name=big&kind=Value")
    q = tab.page
    drawn = q.evaluate("""() => {
      const plot = document.querySelector("#panel-tensors .tensor");
      return plot.data.map((t) => t.name).filter(Boolean);
    }""")
    assert "NaN" in drawn
    assert "+Inf" in drawn
    # its tile has a color that is not in the scale
    images = q.locator("#panel-tensors .tensor .heatmaplayer image")
    assert images.count() == 3
    assert "NaN" in q.locator("#panel-tensors .stats").inner_text()
    box = images.first.bounding_box()
    x = box["x"] + box["width"] * 3210 / 4096
    y = box["y"] + box["height"] * 1234 / 4096
    q.mouse.move(x - 9, y - 9)
    q.mouse.down()
    q.mouse.move(x + 9, y + 9, steps=5)
    with q.expect_response(lambda r: "zoom=" in r.url):
        q.mouse.up()
    q.wait_for_function(
        "() => String(document.querySelector('#panel-tensors .tensor').layout.meta.tile) === '1,1'"
    )
    top, bottom, left, right = (int(n) for n in tab.state()["zoom"].split(","))
    assert top < 1234 < bottom < top + 400
    assert left < 3210 < right < left + 400
    q.get_by_role("button", name="Whole slice").click()
    q.wait_for_function(
        "() => String(document.querySelector('#panel-tensors .tensor').layout.meta.tile) !== '1,1'"
    )


def test_reloading_restores_the_state(visit):
    tab = visit("run=a")
    q = tab.page
    q.select_option("#kind", "Gradient")
    q.fill("#search", "blocks")
    tab.open("lines")
    q.get_by_role("treeitem", name="blocks.1.attn").click()
    q.get_by_role("treeitem", name="blocks.0.attn").click(modifiers=["Control"])
    q.get_by_role("button", name="std", exact=True).click()
    q.get_by_role("button", name="Log", exact=True).first.click()
    q.fill("#step", "13")
    q.press("#step", "Enter")
    q.click("#theme")
    tab.shown("lines")
    before, address = tab.state(), q.evaluate("location.href")
    q.reload()
    tab.ready()
    tab.shown("lines")
    assert q.url == address
    assert tab.state() == before
    assert q.locator("html").get_attribute("data-theme") == "dark"
    assert q.input_value("#search") == "blocks"
    assert q.input_value("#step") == "13"
    assert q.locator("#panel-lines .chip [title]").all_inner_texts() == [
        "blocks.1.attn",
        "blocks.0.attn",
    ]
    assert (
        q.evaluate("document.querySelector('#panel-lines .js-plotly-plot').layout.yaxis.type")
        == "log"
    )


def test_keyboard_and_curve_set_the_step(visit):
    tab = visit("run=a&step=10")
    q = tab.page
    q.keyboard.press("ArrowRight")
    assert q.input_value("#step") == "11"
    q.keyboard.press("Shift+ArrowLeft")
    assert q.input_value("#step") == "1"
    q.keyboard.press("End")
    assert q.input_value("#step") == str(STEPS - 1)
    q.keyboard.press("/")
    q.keyboard.type("attn")
    q.wait_for_function("() => document.getElementById('found').innerText === '2 of 7 names'")
    q.keyboard.press("Escape")
    q.keyboard.press("?")
    assert q.locator("#keyboard").is_visible()
    q.keyboard.press("Escape")
    q.wait_for_selector("#keyboard", state="hidden")
    q.keyboard.press("3")
    tab.shown("exponents")
    q.keyboard.press("Home")
    assert q.input_value("#step") == "0"
    q.keyboard.press(" ")
    q.wait_for_function("() => Number(document.getElementById('step').value) >= 3")
    q.keyboard.press(" ")
    box = q.locator("#training .nsewdrag").first.bounding_box()
    q.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    q.mouse.click(box["x"] + box["width"] / 2, box["y"] + 20)
    q.wait_for_function("() => ['14', '15'].includes(document.getElementById('step').value)")


def test_names_are_never_markup(visit):
    tab = visit("run=a&kind=Gradient")
    q = tab.page
    row = q.get_by_role("treeitem").filter(has_text="onerror")
    assert row.inner_text().strip() == HOSTILE
    row.click()
    for name in ("lines", "exponents", "tensors", "alerts", "overview"):
        tab.open(name)
        assert q.locator("main img").count() == 0
        assert q.locator("main b").filter(has_text="'\"&").count() == 0
    assert "onerror" in q.locator("#panel-overview .overview").text_content()


def test_compares_two_runs(visit):
    tab = visit("run=a&tab=compare")
    q = tab.page
    q.get_by_label("The other run").first.select_option("b")
    frame = q.frame_locator("#panel-compare iframe")
    frame.locator("#verdict").wait_for()
    assert frame.locator("#verdict").inner_text() == "✗ The runs differ"
    first = frame.locator("main section").first.inner_text()
    assert re.search(r"Config\s+A\s+B\s+config lr\s+0.0003\s+0.00045", first), first
    assert "embed" in frame.locator("#first").inner_text()
    frame.locator("#figure0").scroll_into_view_if_needed()
    frame.locator("#figure0 .hm").first.wait_for()
    assert tab.state()["other"] == "b"
    back = "getComputedStyle(document.body).backgroundColor"
    light = frame.locator("body").evaluate(f"() => {back}")
    q.click("#theme")
    dark = q.frame_locator("#panel-compare iframe[data-theme=dark]")
    dark.locator("#verdict").wait_for()
    assert dark.locator("body").evaluate(f"() => {back}") != light
    q.get_by_role("button", name="Show its lines").click()
    tab.shown("lines")
    assert tab.state()["step"] == "12"


def test_empty_run_and_run_of_values(visit):
    tab = visit("run=empty")
    for name in VIEWS:
        if name in UNUSED:
            continue
        tab.open(name)
        assert tab.page.locator(f"#panel-{name}").inner_text().strip()
    tab.open("alerts")
    tab.page.get_by_role("heading", name="No rule looked at this run", exact=True).wait_for()
    tab.page.get_by_role("option", name="raw").click()
    tab.open("overview")
    # numbers with their value, tensors with their RMS, which was not recorded
    plot = "document.querySelector('#panel-overview .overview')"
    rows = tab.page.evaluate(f"{plot}.layout.meta.layers")
    assert rows == ["big", "cube", "seven", "number"]
    shown = tab.page.evaluate(f"{plot}.data[0].customdata._inputArray ?? {plot}.data[0].customdata")
    assert np.isclose(np.array(shown, float)[3, 0, 2], 2.5)
    statistic = tab.page.locator("#panel-overview").get_by_label("Statistic", exact=True)
    assert statistic.locator("option:checked").inner_text() == "value or RMS"
    tab.page.fill("#search", "nothing of this name")
    tab.page.get_by_text("no value or RMS of Value").wait_for()
    # a figure after a message reacts to clicks again
    tab.page.fill("#search", "")
    tab.page.wait_for_selector("#panel-overview .heatmaplayer image")
    tab.shown("overview")
    box = tab.page.locator("#panel-overview .heatmaplayer image").first.bounding_box()
    tab.page.mouse.click(box["x"] + 5, box["y"] + 5)
    tab.shown("exponents")


def test_ranks_side_by_side(chromium, tmp_path):
    values = {}
    for rank in range(8):
        run = Writer(tmp_path, "r", rank=rank, world_size=8)
        for step in range(10):
            for name in ("fc.weight", "head.weight"):
                x = np.full((4, 4), 1 + rank / 100, "f4")
                if rank == 6 and step >= 5:
                    x *= 3
                values[rank, step] = float(np.sqrt((x.astype("f8") ** 2).mean()))
                kept = x if name == "fc.weight" else None
                tags = {"mesh": f"dp={rank // 4}/2 cp={rank % 4}/4"}
                run.put(name, "Weight", step, kept, summarize_array(x), "float32", x.shape, tags)
        for step in range(10, 13 if rank == 3 else 22):
            run.seq = step * 10**10  # which is also the time: rank 3 ends 90 s before the others
            run.put("loss", "Metric", step, 1.0)
        run.close(end=rank == 7)
    address = "run=r&tab=ranks&kind=Weight&name=fc.weight&theme=dark"
    with serving(tmp_path) as page, Tab(chromium, page, f"#{address}") as tab:
        q = tab.page
        labels = q.locator("#panel-ranks .rank-row .label")
        assert labels.all_inner_texts()[:2] == ["dp 0", "cp 0 · rank 0"]
        far = q.get_by_label("Outliers").locator(".chip")
        assert far.all_inner_texts() == ["rank 6"]
        q.wait_for_selector(".rank-row .flag")
        assert q.locator(".rank-row .flag").all_inner_texts() == ["behind", "far"]
        alerted = q.get_by_label("Alerts about ranks").locator(".chip")
        assert alerted.all_inner_texts() == ["rank 6: far · fc.weight", "rank 3: behind"]
        assert "most ranks are at step 21, 90 s later" in alerted.last.get_attribute("title")
        image = q.locator("#panel-ranks .heatmaplayer image").first

        def point(row, column, columns=10):
            box, rows = image.bounding_box(), labels.count()
            return (box["x"] + box["width"] * (column + 0.5) / columns,
                    box["y"] + box["height"] * (row + 0.5) / rows)  # fmt: skip

        q.mouse.move(*point(8, 7))  # dp 1 is row 5
        hover = q.locator("#panel-ranks .hoverlayer text").first.text_content()
        assert hover.startswith("rank 6step 7RMS (rm2) ")
        assert np.isclose(float(re.search(r"rm2\) ([\d.]+?)[+−]", hover)[1]), values[6, 7], 1e-4)
        # a closed group shows the rank that is far
        q.locator(".rank-row", has_text="dp 1").click()
        q.wait_for_function("() => document.querySelectorAll('.rank-row').length === 6")
        tab.shown("ranks")
        cell = "document.querySelector('#panel-ranks .ranks')._fullData[0]"
        assert round(q.evaluate(f"{cell}.z[5][7]"), 4) == round(values[6, 7], 4)
        q.get_by_role("button", name="− median rank").click()
        q.wait_for_function(f"() => {cell}.z[5][7] > 100 && Math.abs({cell}.z[1][7]) < 10")
        q.locator(".rank-row", has_text="dp 1").press("ArrowRight")
        q.wait_for_function("() => document.querySelectorAll('.rank-row').length === 10")
        q.get_by_role("button", name="By layers").click()
        q.wait_for_function(f"() => {cell}.z[0].length === 2")
        tab.shown("ranks")
        q.locator("#tab-problems").click()
        q.locator(
            "#panel-alerts tr", has_text="rank 3 is 9 recorded steps behind"
        ).click()  # to ranks by steps
        q.wait_for_function(f"() => {cell}.z[0].length === 10")
        tab.shown("ranks")
        q.mouse.click(*point(8, 7))
        q.wait_for_selector("#tab-tensors[aria-selected=true]")
        tab.shown("tensors")
        state = tab.state()
        assert (state["name"], state["rank"], state["step"]) == ("fc.weight", "6", "7")


def test_follows_a_training_until_the_server_stops(chromium, tmp_path):
    run = Writer(tmp_path, "r")

    def train(steps):
        for step in steps:
            run.step(step)
            run.flush()

    train(range(20))  # enough for a curve to be encoded as bytes
    with (
        serving(tmp_path) as page,
        Tab(chromium, page, "#run=r&follow=1&tab=overview") as one,
        Tab(chromium, page, "#run=r&step=1&tab=overview") as two,
    ):
        at = "() => Number(document.getElementById('step').value) === {}"
        one.page.wait_for_function(at.format(19))
        train(range(20, 24))
        one.page.wait_for_function(at.format(23))
        # both curves have grown; the step of the second page stays
        for each in (one, two):
            each.page.wait_for_function(
                "() => document.getElementById('training').data[0].x.at(-1) === 23"
            )
            assert "training" in each.page.locator("#title").inner_text()
            assert each.page.locator("#title .pill").bounding_box()["height"] < 30
            each.page.wait_for_function(
                "() => document.querySelector('#panel-overview .overview')._fullData[0]"
                ".x.length === 24"
            )
        assert two.page.input_value("#step") == "1"
        two.open("tensors")
        assert "head" in two.page.locator("#panel-tensors h3").first.inner_text()
        run.close()
        one.page.wait_for_selector("#title .pill.ended")
        shutil.rmtree(tmp_path / "r")
        one.page.wait_for_selector("#title .pill.deleted")
        one.page.get_by_text("deleted while it was shown").wait_for()
        for each in (one, two):
            each.check()
        page.close()
        one.page.wait_for_selector("body[data-push=closed]")
        one.page.get_by_text("does not respond").wait_for()
        for each in (one, two):
            each.page.goto("about:blank")  # it goes on trying to connect
            each.errors.clear()  # the browser logs that it cannot


def test_a_figure_fits_a_window_that_was_resized_behind_another_tab(chromium, page):
    with Tab(chromium, page) as tab:
        tab.open("exponents")
        tab.page.wait_for_selector("#panel-exponents .js-plotly-plot")
        tab.open("compare")
        assert tab.page.locator("#tabpanel-compare > .tools").is_hidden()  # it has one view
        tab.page.set_viewport_size({"width": 800, "height": 600})
        tab.open("exponents")
        tab.page.wait_for_function("""() => {
            const plot = document.querySelector("#panel-exponents .js-plotly-plot");
            return Math.abs(plot._fullLayout.width - plot.clientWidth) < 2;
        }""")
