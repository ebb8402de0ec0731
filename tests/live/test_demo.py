"""`tensortap demo`: everything at once, as a newcomer starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import httpx
import pytest

import tensortap as tap
from tests.commands import type_in
from tests.live.conftest import ROOT


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """What the demo printed, and where it kept things; the page is up while this is used."""
    folder = tmp_path_factory.mktemp("demo")
    env = dict(os.environ, PYTHONPATH=str(ROOT / "src"), COLUMNS="120", BROWSER="true")
    env.update(PYTHONUNBUFFERED="1", XDG_CONFIG_HOME=str(folder / "config"))
    command = [sys.executable, "-m", "tensortap", "demo", "--steps", "40", "--view"]
    process = subprocess.Popen(
        [*command, "--folder", str(folder)],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "press Ctrl-C to end" in line:
            break
    yield "".join(lines), folder, process
    process.kill()
    process.communicate()


def test_the_demo(demo):
    said, folder, process = demo
    assert process.poll() is None, said
    for words in ("step   30  loss", "tap.summary()", 'tap.get("caught")', "tap.receipt()"):
        assert words in said
    assert "blocks.1.mlp.0: everything before it agrees, its output does not" in said
    assert "b is a rounded to bfloat16" in said
    assert re.search(r"first +blocks\.1\.mlp\.0 +Activation +step 20 ", said)
    assert re.search(
        r"step 35, blocks\.0\.attn\.softmax .* values are NaN, the first in this", said
    )
    assert "it began in blocks.0.attn.softmax" in said
    assert f"10 frames in {folder / 'film.mp4'}" in said
    runs = sorted((folder / "runs").iterdir())
    assert [len(tap.open(run).names()) > 5 for run in runs] == [True, True]
    for page in ("compare.html", "report.html"):
        assert str(folder / page) in said
        assert "<script" in (folder / page).read_text()
    assert not (folder / "config").exists()  # the key of the user is left alone
    for line in re.findall(r"(?:in a terminal| {13}) +tensortap (.*)", said):
        code, _, err = type_in(*line.split())
        assert code == (1 if line.startswith("compare") else 0), err


def test_page_of_the_demo(demo):
    said, _, process = demo
    (url,) = re.findall(r"http://127\.0\.0\.1:\d+/\S*", said)
    with httpx.Client(follow_redirects=True, timeout=60) as browser:
        assert "tensortap" in browser.get(url).raise_for_status().text
    assert httpx.get(url.partition("?")[0], timeout=60).status_code == 401
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
