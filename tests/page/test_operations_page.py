"""The page in a real browser: why values stopped being finite, and operations of modules."""

from __future__ import annotations

import pytest
import torch

import tensortap as tap
from tensortap.alerts.alert import Alert, record_of
from tensortap.capture.pipeline import pipeline
from tensortap.core.record import Kind, Record
from tests.ops.test_why import HOSTILE, hostile_explanation
from tests.page.conftest import serving
from tests.page.test_page import Tab, chromium, pytestmark  # noqa: F401


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.log(self.inner(x) * 0) + x


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a verdict of a bad batch at step 2, and a hostile one at step 3."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runs")
    path = tap.init(folder)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x):
        optimizer.zero_grad()
        scale = torch.log(x.abs().sum(1, keepdim=True))
        loss = (scale * model(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = tap.blackbox(train_step, model, optimizer)
    with tap.track(model, optimizer, alerts=True) as tracker:
        for number in range(3):
            x = torch.randn(6, 4)
            if number == 2:
                x[3] = 0
            tracker.step(loss=step(x))
    with tap.ops(net := Net()):
        net(torch.ones(2, 4))
    alert = Alert("why", HOSTILE, Kind.OP, 9, 0, "", HOSTILE, explanation=hostile_explanation())
    pipeline.put(record_of(alert, seq=9999, time_ns=0))
    tags = {"module": HOSTILE, "op": HOSTILE, "index": "0", "line": HOSTILE, "why": HOSTILE,
            "made": "x"}  # fmt: skip
    pipeline.put(Record(f"{HOSTILE}:0:{HOSTILE}", Kind.OP, 9, 0, 9998, 0, 1, 0, tags=tags))
    tap.finish()
    return path


@pytest.fixture(scope="module")
def tab(chromium, run):  # noqa: F811
    with serving(run) as page, Tab(chromium, page) as tab:
        yield tab


def test_why_is_beside_the_alert(tab, run):
    tab.go(f"run={run.name}&tab=alerts")
    q = tab.page
    card = q.locator(".verdict")
    assert card.is_hidden()
    row = q.locator("#panel-alerts tbody tr", has_text="nan").first
    row.locator("button.why").click()
    tab.shown("alerts")
    assert tab.state()["why"] == "2+0+Op+run.%3Clocals%3E.train_step:2:log"
    q.wait_for_selector(".verdict pre")
    text = card.inner_text()
    for words in (
        "step 2: data. log in the forward", "check row 3 of the batch",
        "scale = torch.log(x.abs().sum(1, keepdim=True))", "in run.<locals>.train_step",
        "log of 0: 1 element is 0", "[6, 1] f32", "-Inf 1!", "What led there", "train_step:1:sum",
    ):  # fmt: skip
        assert words in text, words
    here = card.locator("pre .here")
    assert here.inner_text().split(None, 1)[1].startswith("scale = torch.log")
    assert card.locator("pre span").count() == 7
    q.click(".verdict button")
    tab.shown("alerts")
    assert card.is_hidden()
    q.go_back()
    tab.shown("alerts")
    assert card.is_visible()
    tab.check()


def test_hostile_explanations_are_only_text(tab, run):
    tab.go(f"run={run.name}&tab=alerts&why=9")
    q = tab.page
    q.wait_for_selector(".verdict pre")
    assert HOSTILE in q.locator(".verdict").inner_text()
    assert not q.locator(".verdict img, .verdict b, .verdict iframe").count()
    tab.check()


def test_a_module_unfolds_into_its_operations(tab, run):
    tab.go(f"run={run.name}&tab=operations&step=3")
    q = tab.page
    rows = q.locator("#panel-operations tbody tr")
    assert "step 3 · 6 records" in q.locator("#panel-operations").inner_text()
    module = rows.filter(has_text="Net")
    assert module.count() == 1
    module.click()
    q.wait_for_selector("#panel-operations tr.operation")
    operations = q.locator("#panel-operations tr.operation")
    texts = operations.all_inner_texts()
    log = next(text for text in texts if "log" in text)
    for words in ("forward", "test_operations_page.py:", "Net.forward", "log of 0: 8 elements",
                  "[2, 4] f32", "-Inf"):  # fmt: skip
        assert words in log, words
    assert any("from Net:" in text and "add" in text for text in texts)
    assert tab.state()["module"] == "Net"
    rows.filter(has_text="Net").first.press("Enter")
    q.wait_for_function("!document.querySelector('#panel-operations tr.operation')")
    rows.filter(has_text="Net").first.click()
    operations.filter(has_text="log").first.click()
    tab.shown("exponents")
    assert tab.state()["kind"] == "Op"
    assert q.locator("#tree [role=treeitem]", has_text="log").count()
    tab.check()


def test_hostile_operations_are_only_text(tab, run):
    tab.go(f"run={run.name}&tab=operations&step=9")
    q = tab.page
    q.locator("#panel-operations tr.module").first.click()
    q.wait_for_selector("#panel-operations tr.operation")
    assert q.locator("#panel-operations").inner_text().count(HOSTILE) == 2
    assert not q.locator("#panel-operations img, #panel-operations b").count()
    tab.check()


def test_health_has_a_light_per_rule_that_found_something(tab, run):
    tab.go(f"run={run.name}&tab=health")
    q = tab.page
    rows = q.locator("#panel-health tbody tr")
    assert rows.first.locator(".light.problem").get_attribute("aria-label") == "problem"
    assert rows.first.locator("td").nth(1).inner_text() == "inf"
    quiet = q.locator("#panel-health details.fine")
    assert quiet.locator("tr").first.is_hidden()
    quiet.locator("summary").click()
    assert quiet.locator("tr", has_text="vanishing").is_visible()
    rows.first.click()
    tab.shown("alerts")
    assert tab.state()["rule"] == "inf"
