"""`python -m tensortap`, in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.commands import type_in
from tests.live.conftest import ROOT


@pytest.fixture
def command():
    """Run a command; what it printed, and its exit code."""

    def start(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tensortap", *arguments],
            env=dict(os.environ, PYTHONPATH=str(ROOT / "src"), COLUMNS="160", **env),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return start


@pytest.fixture
def served():
    """`tensortap serve` on a free port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tensortap", "serve", "--port", "0", "--memory", "64MB"],
        env=dict(os.environ, PYTHONPATH=str(ROOT / "src"), PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "listening on 127.0.0.1:" in line
    yield process, line.split("listening on ")[1].split(",")[0]
    process.kill()
    process.communicate()


def test_serve_and_top(served, command, run):
    process, address = served
    program = run(
        """
        import numpy as np, tensortap as tap
        for i in range(3):
            assert tap.catch(np.full(20_000, i), "weights").wait(60)
        """,
        to=address,
    )
    program.end()
    code, shown, said = type_in("top", "--once", address)
    assert code == 0, said
    assert "weights" in shown
    assert "3 records" in shown
    seen = json.loads(command("top", "--json", TENSORTAP_SERVER=address).stdout)
    assert seen["written"] == 3
    assert [row["records"] for row in seen["names"]] == [3]
    assert seen["clients"][0]["records"] == 3
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "received 3 records" in err


def test_doctor(server, monkeypatch):
    address = server.address
    code, shown, said = type_in("doctor", str(address))
    assert code == 0, said
    assert f"session at {address}" in shown
    assert "yes: process" in shown
    key = "tap1-" + "A" * 43
    monkeypatch.setenv("TENSORTAP_KEY", key)
    found = json.loads(type_in("doctor", "--json", "127.0.0.1:1")[1])
    assert found["answers"].startswith("no: ")
    assert found["missing"] == []
    assert found["needed"]["pyzmq"]
    assert found["statistics kernel"].startswith(("C, for ", "NumPy: the C kernel was not built"))
    assert "AAAA" not in json.dumps(found)
