"""The example of a room in another package: installed, it adds a rule, a command and a tab."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest

from tensortap.core.record import Kind, Record
from tensortap.stats import summarize_array
from tests.environments import ROOT, environment, shell
from tests.figures.conftest import RunWriter

PROGRAM = """
import json, sys
from urllib.request import Request, urlopen
import tensortap as tap

run = tap.open(sys.argv[1])
(alert,) = (alert for alert in run.alerts(rules=True) if alert.rule == "all_zero")
assert (alert.name, alert.step, alert.message) == ("zeros", 3, "all elements are 0"), alert
assert tap.alerts.all_zero in tap.alerts.default_rules()

page = tap.view(run.path, browser=False, port=0)
answer = urlopen(page.url)
key = answer.read().decode().partition('data-key="')[2].partition('"')[0]
headers = {"cookie": answer.headers["set-cookie"].partition(";")[0], "x-tensortap-key": key}
get = lambda path: urlopen(Request(page.address + path, headers=headers)).read()
assert json.loads(get("api/tabs"))[-1] == "/rooms/greeting/greeting.js"
assert b"export const tab" in get("rooms/greeting/greeting.js")
assert json.loads(get(f"api/greeting?run={run.path.name}")) == {"names": 2}
page.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_room_of_another_package(tmp_path):
    run = RunWriter(tmp_path / "runs")
    for name, value in (("ones", 1.0), ("zeros", 0.0)):
        stats = summarize_array(np.full(8, value, "f4"))
        run.write([Record(name, Kind.VALUE, 3, 0, 0, 0, 1, 0, dtype="float32", stats=stats)])
    run.close()
    (tmp_path / "look.py").write_text(PROGRAM)
    # copies: to build in the checkout would leave files there
    ignored = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "src", tmp_path / "tensortap" / "src", ignore=ignored)
    for file in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / file, tmp_path / "tensortap")
    shutil.copytree(ROOT / "examples" / "plugin", tmp_path / "plugin")
    with environment("all") as venv:
        said = shell(
            "pip uninstall -qy tensortap tensortap-greeting\n"
            "pip install -q './tensortap[view]' ./plugin\n"
            f"python look.py {run.path}\n"
            f"tensortap greet {run.path}",
            tmp_path, PATH=f"{venv / 'bin'}:{os.environ['PATH']}", CC="/bin/false",
        )  # fmt: skip
    assert said.endswith("hello, 2 names\n"), said
