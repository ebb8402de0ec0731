"""The package: its names, its version, and the cost of importing it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tensortap as tap

ROOT = Path(__file__).parents[1]
HEAVY = (
    "numpy torch jax jaxlib pandas plotly pyarrow starlette uvicorn websockets h5py av PIL rich "
    "typer ml_dtypes safetensors lightning transformers tensorboard wandb"
).split()


def test_public_names():
    """Those of tests/typed_script.py, which pins them: whoever adds a verb adds it there."""
    used = set(re.findall(r"\btap\.(\w+)", (ROOT / "tests/typed_script.py").read_text()))
    assert tap.__all__ == sorted(used | {"__version__", "rooms"}) == dir(tap)
    assert set(tap._LATER) < set(tap.__all__)


def test_public_names_have_docstrings():
    for name in tap.__all__:
        found = getattr(tap, name)
        if name not in ("__version__", "alerts", "rooms", "viz"):
            assert found.__doc__, name
            assert found.__module__.startswith("tensortap"), name


def test_unknown_name():
    assert not hasattr(tap, "nothing")


def test_version_is_the_top_of_the_changelog():
    top = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert top[1].strip("[]") == tap.__version__


def python(code: str) -> str:
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n{code}",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_import_loads_nothing_heavy_and_starts_nothing():
    code = f"""
import threading, os
files = len(os.listdir("/proc/self/fd"))
import tensortap
print([name for name in {HEAVY!r} if name in sys.modules])
print(threading.active_count(), len(os.listdir("/proc/self/fd")) - files)
"""
    assert python(code).splitlines() == ["[]", "1 0"]


def test_catch_without_session_loads_nothing_heavy(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("TENSORTAP_SERVER", "127.0.0.1:1")
    code = f"""
import tensortap as tap
tap.catch(1.5, "x"); tap.catch({{"a": [1, "b"]}}, "y"); tap.step(); tap.receipt()
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    assert python(code) == "[]\n"


@pytest.mark.slow
def test_import_is_about_as_fast_as_its_dependencies(tmp_path):
    """Compare the least processor time of many imports, which other processes disturb least."""
    # as users have it: compiled once, and without what other packages add to each start (-S)
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    paths = os.pathsep.join([str(ROOT / "src"), *sys.path])
    environment = {**kept, "PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONPATH": paths}
    timed = (
        "import time; start = time.process_time()\nimport {}\nprint(time.process_time() - start)"
    )
    modules = {"ours": "tensortap", "theirs": "json, logging, concurrent.futures, zmq, msgspec"}
    times: dict[str, list[float]] = {who: [] for who in modules}
    for _ in range(10):
        for who, imported in modules.items():
            command = [sys.executable, "-S", "-c", timed.format(imported)]
            run = subprocess.run(command, env=environment, capture_output=True, check=True)
            times[who].append(float(run.stdout))
    assert min(times["ours"]) < 1.5 * min(times["theirs"]), times


def test_import_leaves_the_protocols_of_other_verbs_to_them():
    code = "import tensortap; print([x for x in sys.modules if x.startswith('tensortap.')])"
    loaded = python(code)
    assert "tensortap.values.protocol" in loaded
    for other in ("observing", "operations", "steps", "replaying", "widths"):
        assert other not in loaded


def test_doctor_knows_every_extra():
    from tensortap.rooms.doctor.command import _EXTRAS

    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = tool["project"]["optional-dependencies"]
    named = {
        extra: tuple(re.match(r"[\w-]+", package)[0] for package in packages)
        for extra, packages in extras.items()
        if extra not in ("all", "test", "lint", "docs", "bench", "peers")
    }
    for extra, packages in _EXTRAS.items():
        assert set(named[extra]) <= set(packages), extra
    assert set(_EXTRAS) == set(named)
