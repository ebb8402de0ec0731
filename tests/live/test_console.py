"""The verbs of a live session, as people type them."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import sys
import time

from tests.live.conftest import ROOT


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


def test_top_filters_scrolls_and_ends(server, run):
    run("""
        import numpy as np, tensortap as tap
        from tensortap.alerts import rules
        for i in range(500):
            tap.catch(np.ones(3), f"layer{i:03}")
        tap.catch(np.array([1, np.nan]), "layer250")
        tap.catch(1.5, "loss"); tap.catch("nan inf", rules.ACTIVE_RULES)
        assert tap.flush(60)
    """).end()
    env = dict(os.environ, PYTHONPATH=str(ROOT / "src"), TERM="xterm", LINES="30", COLUMNS="100")
    env["TENSORTAP_SERVER"] = str(server.address)
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execve(sys.executable, [sys.executable, "-m", "tensortap", "top"], env)
    try:
        whole = _read_until(terminal, r"(?s)layer250.*loss.*layer000.*… (\d+) more.*pid \d+")
        assert int(whole[1]) == 501 - 22
        assert "tensortap.rules" not in whole.string
        os.write(terminal, b"\x1b[6~\x1b[B")
        _read_until(terminal, r"(?s)layer019.*layer040")
        os.write(terminal, b"/YER49")
        found = _read_until(terminal, r"(?s)/YER49.*layer490.*layer499.*pid")
        assert "layer040" not in found[0]
        os.write(terminal, b"\rq")
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
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
