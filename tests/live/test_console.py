"""The verbs of a live session, as people type them."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import time

import pytest

import tensortap as tap
from tensortap.api import session as live
from tests.live.conftest import ROOT


@pytest.fixture
def session(server, run, monkeypatch):
    """The session of this process, with something in it."""
    monkeypatch.setattr(live, "_session", live.Session(server))
    monkeypatch.setenv("COLUMNS", "160")
    run("""
        import numpy as np, tensortap as tap
        for i in range(5):
            tap.catch(1 / (i + 1), "loss")
            tap.step()
        tap.catch(np.float32([1, np.nan, np.inf]), "blocks.3.attn")
        tap.catch([1, 2], "list"); tap.catch("bad", "loss-1"); tap.catch(7, "class")
        tap.catch(np.arange(20_000), "big"); tap.catch({"a": np.ones(3), "b": None}, "state")
        tap.catch("x", "[bold]markup\\x1b[31m")
        assert tap.flush(60)
    """).end()
    return server


def test_another_process_sees_the_same(session, run):
    program = run(
        f"""
        import tensortap as tap
        with tap.open("{session.address}") as view:
            assert view.get("loss") == 0.2
            assert view.get("loss", 1) == 0.25
            assert view.get("loss", step=0, rank=0) == 1.0
            assert view.get_all("loss")[0] == 1.0 and len(view.get_all("loss")) == 5
            assert view.get("big")[-1] == 19_999
            assert view.get("blocks.3.attn").shape == (3,)
            assert view.get("state")["a"].tolist() == [1, 1, 1]
            assert "loss" in view.names()
            value = view.get("big"); value[:] = 0
            assert view.get("big")[-1] == 19_999
            view.summary(); view.describe("loss")
            try:
                view.get("nothing")
            except tap.core.errors.NotFound as error:
                print(error)
        """,
        COLUMNS="160",
    )
    out = program.end()
    assert f"tensortap on {session.address}" in out
    assert "5 records" in out
    assert "no 'nothing'" in out
    # whoever looked has gone, and is no client that sends
    assert len([c for c in session.clients.values() if c.connected]) == 0


def test_a_large_value_crosses_to_a_viewer(server, run):
    run("""
        import numpy as np, tensortap as tap
        assert tap.catch(np.arange(5_000_000), "big").wait(60)
    """).end()
    with tap.open(str(server.address)) as view:
        value = view.get("big")
    assert value.shape == (5_000_000,)
    assert value[-1] == 4_999_999


def test_status_returns_on_ctrl_c_and_the_session_goes_on(run, tmp_path):
    code = """
import sys, tensortap as tap
server = tap.serve(port=0, memory="64MB")
print("PORT", server.address.port, flush=True)
tap.status()
print("RETURNED", server.alive, flush=True)
input()
print("HELD", server.server.history.written, tap.get("x"), flush=True)
"""
    env = dict(os.environ, PYTHONPATH=str(ROOT / "src"), TERM="xterm", COLUMNS="100")
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored, where the tests run in background
        os.execve(sys.executable, [sys.executable, "-c", code], env)
    try:
        shown = _read_until(terminal, r"PORT (\d+)")
        port = int(shown[1])
        _read_until(terminal, "Ctrl-C returns")
        program = run(
            """
            import tensortap as tap
            assert tap.catch(1, "x").wait(60); print("one"); input()
            assert tap.catch(2, "x").wait(60)
            """,
            to=f"127.0.0.1:{port}",
        )
        assert program.line() == "one"
        _read_until(terminal, "1 record")
        os.write(terminal, b"\x03")  # what the key sends
        assert _read_until(terminal, r"RETURNED (\w+)")[1] == "True"
        program.say()
        program.end()
        os.write(terminal, b"\n")
        assert _read_until(terminal, r"HELD (\d+) (\d+)").groups() == ("2", "2")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


def _read_until(terminal: int, pattern: str, seconds: float = 120.0):
    seen = ""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                seen += os.read(terminal, 65536).decode(errors="replace")
            except OSError:
                break
        if found := re.search(pattern, seen):
            return found
    raise AssertionError(f"{pattern} did not come: {seen[-2000:]}")
