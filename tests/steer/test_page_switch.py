"""The page: a switch is clicked while a program trains, and the heatmap gets rows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap

import playwright.sync_api as playwright
import pytest

import tensortap as tap
from tests.processes import wait_for

pytestmark = pytest.mark.slow
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
    "--disable-component-update",
]  # fmt: skip
JOB = """
import time, torch, tensortap as tap
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(net.parameters())
with tap.track(net, optimizer, every=0) as tracker:
    while True:
        loss = net(torch.randn(5, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tracker.step(loss=loss)
        time.sleep(0.01)
"""


def test_a_switch_is_clicked_and_the_heatmap_gets_rows(session, tmp_path):
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(JOB))
    env = {**os.environ, "TENSORTAP_SERVER": str(session.address)}
    job = subprocess.Popen([sys.executable, program], env=env)
    shown = tap.view(session, browser=False, port=0)
    try:
        wait_for(lambda: any(p.step > 2 for p in session.probes("^$")))
        with playwright.sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.set_default_timeout(100_000)
            page.goto(shown.url)
            page.wait_for_selector("[data-drawing=no]")
            page.click("#tab-layers")
            page.locator("#tabpanel-layers").get_by_role("button", name="Probes").click()
            row = page.locator("#panel-probes tr", has=page.get_by_text("2.weight", exact=True))
            row.wait_for()
            assert "off" in row.inner_text()
            row.locator("label.switch").click()
            page.wait_for_selector("text=from step")
            page.wait_for_function(
                """() => [...document.querySelectorAll("#panel-probes tr")].some((row) =>
                  row.innerText.includes("2.weight") && row.querySelector("input").checked)"""
            )
            page.get_by_label("What else to do").select_option("ops")
            page.get_by_role("button", name="Do it").click()
            page.wait_for_selector("text=operations for 1 steps")
            page.screenshot(path=tmp_path / "probes.png")
            # the tree has a row with the same switch, and the heatmap the name
            page.wait_for_selector(
                "#rows .row:has-text('weight') input[role=switch]", state="attached"
            )
            page.locator("#tabpanel-layers").get_by_role("button", name="Heatmap").click()
            page.wait_for_function(
                """() => document.querySelector("#panel-overview .js-plotly-plot")
                  ?.data?.[0]?.y?.length"""
            )
            page.screenshot(path=tmp_path / "heatmap.png")
            browser.close()
        assert {r.name for r in session.reader.records("2.weight")} == {"2.weight"}
    finally:
        shown.close()
        job.kill()
        job.wait()
