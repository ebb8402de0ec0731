"""Compare a live session with a run and with itself."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import tensortap as tap
from tensortap.rooms.compare.compared_run import ComparedRun
from tests.runs.conftest import ROOT

pytestmark = pytest.mark.slow

CODE = """
import sys, torch, numpy as np, tensortap as tap
torch.manual_seed(0)
torch.set_num_threads(1)
print(tap.init(sys.argv[1]))
model = torch.nn.Linear(4, 4)
with tap.track(model) as tracker:
    for step in range(3):
        tap.catch(np.arange(5000.0) + step, "x")
        model(torch.ones(2, 4)).sum().backward()
        tracker.step(loss=step * 0.5)
assert tap.flush(60)
tap.finish()
"""


def test_live_session_agrees_with_its_run(tmp_path, monkeypatch):
    serving = """
import subprocess, sys
import tensortap as tap
server = tap.serve()
print(server.address, flush=True)
sys.stdin.read()
"""
    env = {k: v for k, v in os.environ.items() if k != "TENSORTAP_SERVER"}
    env |= {
        "PYTHONPATH": str(ROOT / "src"),
        "XDG_CONFIG_HOME": str(tmp_path),
        "TENSORTAP_PORT": "0",
    }
    command = [sys.executable, "-c", serving]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen(command, env=env, **pipes)
    try:
        lines = iter(server.stdout.readline, "")
        address = next(line.strip() for line in lines if line[0].isdigit())
        train = [sys.executable, "-c", CODE, str(tmp_path / "runs")]
        to = {**env, "TENSORTAP_SERVER": address}
        done = subprocess.run(train, env=to, capture_output=True, text=True, check=True)
        path = done.stdout.strip()
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        with tap.open(address) as view, tap.open(address) as other:
            report = tap.compare(view, path)
            assert report, str(report)
            assert report.compared > 20
            assert report.by_statistics > 10
            again = tap.compare(view, other)
            assert again
            assert again.by_statistics > 10
            side = ComparedRun(view)
            assert side.title == "the live session"
            assert np.array_equal(view.get("x", step=2), np.arange(5000.0) + 2)
    finally:
        server.communicate("", timeout=60)
