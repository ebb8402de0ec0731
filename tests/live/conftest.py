"""Real sessions and real training programs, in processes of their own, for the tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tensortap.console import live
from tensortap.server.server import Server


@pytest.fixture(autouse=True)
def own_key(tmp_path_factory, monkeypatch):
    """A key of the test's own, and no settings of whoever runs it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    for name in list(os.environ):
        if name.startswith("TENSORTAP_"):
            monkeypatch.delenv(name)


@pytest.fixture
def server():
    """A live session in this process, on a port of its own."""
    server = live.start("127.0.0.1", 0, "256MB")
    yield server
    server.close()


class Program:
    """A training program in a process of its own; `line` reads what it prints."""

    def __init__(self, code: str, env: dict[str, str], python: str = sys.executable) -> None:
        source = str(Path(__file__).parents[2] / "src")
        full = dict(os.environ, PYTHONPATH=source, PYTHONUNBUFFERED="1", **env)
        self.process = subprocess.Popen(
            [python, "-c", textwrap.dedent(code)],
            env=full,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        """The next line it prints."""
        assert self.process.stdout is not None
        found = self.process.stdout.readline().strip()
        if not found and self.process.poll() is not None:
            raise AssertionError(f"the program ended: {self.process.stderr.read()}")
        return found

    def say(self, text: str = "") -> None:
        """Send it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self, timeout: float = 60) -> str:
        """Wait until it has ended well; what it printed."""
        out, err = self.process.communicate(timeout=timeout)
        assert self.process.returncode == 0, err
        return out

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()


@pytest.fixture
def run(server):
    """Start a training program that knows where the session of the test listens."""
    started: list[Program] = []

    def start(code: str, to: Server | str | None = None, **env: str) -> Program:
        target = to if to is not None else server
        where = target if isinstance(target, str) else str(target.address)
        program = Program(code, {"TENSORTAP_SERVER": where, **env})
        started.append(program)
        return program

    yield start
    for program in started:
        with contextlib.suppress(ProcessLookupError):
            program.process.kill()
        program.process.communicate()


def wait_for(condition, timeout: float = 20.0, what: str = "") -> None:
    """Wait until a condition holds that another process brings about."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, what or "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture(name="wait_for")
def wait_for_fixture():
    return wait_for
