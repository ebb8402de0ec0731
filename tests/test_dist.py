"""`make dist`: what it builds, that the wheel works where there is no compiler, and with rooms of
another package."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tensortap.core.record import Kind, Record
from tensortap.stats import summarize_array
from tests.environments import ROOT, environment, quick_compiler, shell
from tests.figures.conftest import RunWriter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

EXTENSIONS = ("capture._fast", "stats._kernel", "rooms.track.jax._xla")
LOAD = """
import importlib.machinery, importlib.util, pathlib, sys, tensortap
for name in sys.argv[1:]:
    (file,) = pathlib.Path(tensortap.__path__[0]).glob(name.replace(".", "/") + ".*.so")
    loader = importlib.machinery.ExtensionFileLoader(f"tensortap.{name}", str(file))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    loader.exec_module(importlib.util.module_from_spec(spec))
    print(name, "works")
"""

# what examples/plugin adds, where it is installed
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
assert b'class="tab" href="/rooms/greeting/greeting.js"' in get("")
assert b"export const tab" in get("rooms/greeting/greeting.js")
assert json.loads(get(f"api/greeting?run={run.path.name}")) == {"names": 2}
page.close()
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build once; the environment of the tests has what `make dist` installs."""
    folder = tmp_path_factory.mktemp("dist")
    products = (ROOT / "build", ROOT / "dist", ROOT / "src" / "tensortap.egg-info")
    before = [path.exists() for path in products]
    stamp = Path(sys.prefix, ".ready-dist")
    shell(
        f"make dist VENV={sys.prefix} DIST={folder / 'dist'} PYTHONS={sys.executable} -o {stamp}",
        ROOT, CC=quick_compiler(folder),
    )  # fmt: skip
    assert [path.exists() for path in products] == before
    return folder / "dist"


def test_sdist_and_wheel_are_complete(built):
    sdist, wheel = sorted(built.iterdir(), key=lambda path: path.suffix)
    assert re.fullmatch(r"tensortap-[\d.]+\.tar\.gz", sdist.name)
    assert re.search(r"-cp3\d+-cp3\d+-manylinux_\d+_\d+_\w+\.whl$", wheel.name)
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    files = [path.relative_to(ROOT) for path in (ROOT / "src").rglob("*") if path.is_file()]
    wanted = {str(path) for path in files if path.suffix not in (".so", ".pyc")}
    assert {name for name in wanted if ".egg-info" not in name} <= inside
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= inside
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert len([name for name in packed if name.endswith(".so")]) == len(EXTENSIONS)
    sources = (".c", ".h", ".so", ".pyc")
    needed = {str(path.relative_to("src")) for path in files if path.suffix not in sources}
    assert {name for name in needed if ".egg-info" not in name} <= packed


def test_wheel_works_without_a_compiler(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    venv = environment(tmp_path / "venv", "torch")
    (tmp_path / "load.py").write_text(LOAD)
    said = shell(
        f"pip install -q {wheel}\n"
        f"python load.py {' '.join(EXTENSIONS)}\n"
        "tensortap demo --steps 40 --folder here",
        tmp_path, PATH=f"{venv}/bin", CC="/bin/false",
    )  # fmt: skip
    assert [name for name in EXTENSIONS if f"{name} works" not in said] == []
    assert re.search(r"first +blocks\.1\.mlp\.0 +Activation +step 20 ", said), said
    assert "a report needs plotly: pip install kaleido" in said
    assert len(os.listdir(tmp_path / "here" / "runs")) == 2


def test_a_room_of_another_package(built, tmp_path):
    """Installed, examples/plugin adds a rule, a command and a tab."""
    run = RunWriter(tmp_path / "runs")
    for name, value in (("ones", 1.0), ("zeros", 0.0)):
        stats = summarize_array(np.full(8, value, "f4"))
        run.write([Record(name, Kind.VALUE, 3, 0, 0, 0, 1, 0, dtype="float32", stats=stats)])
    run.close()
    (tmp_path / "look.py").write_text(PROGRAM)
    # a copy: to build in the checkout would leave files there
    shutil.copytree(ROOT / "examples" / "plugin", tmp_path / "plugin")
    (sdist,) = built.glob("*.tar.gz")
    venv = environment(tmp_path / "venv", "view")
    said = shell(
        f"pip install -q '{sdist}[view]' ./plugin\npython look.py {run.path}\n"
        f"tensortap greet {run.path}",
        tmp_path, PATH=f"{venv}/bin:{os.environ['PATH']}", CC="/bin/false",
    )  # fmt: skip
    assert said.endswith("hello, 2 names\n"), said
