"""Real sessions and real training programs, in processes of their own, for the tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tensortap.api import session as live
from tensortap.api.open import RemoteSession
from tensortap.live import answers
from tensortap.live.answers import ClientRow
from tensortap.live.server import Server
from tests.forks import Starter
from tests.processes import wait_for

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent


def pytest_ignore_collect(config):
    """Import none of these tests for `make check`."""
    return True if config.option.markexpr == "not slow" else None


def pytest_collection_modifyitems(items):
    """Mark these tests as slow: each one starts programs."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def server():
    """A live session in this process, on a port of its own."""
    server = live.start("127.0.0.1", 0, "256MB")
    yield server
    server.close()


class Starters:
    """Starts programs: forked from a process that has their imports, where that is possible."""

    IMPORTS = "msgspec, numpy, zmq, tensortap, tensortap.api.open, tensortap.live.sink"

    def __init__(self) -> None:
        self._running: dict[str, Starter] = {}

    # at its end a program waits two seconds for what is queued, which a busy machine may exceed
    PATIENT = "import tensortap.capture.pipeline\ntensortap.capture.pipeline.EXIT = 200.0\n"

    def start(self, code: str, env: dict[str, str], before: Sequence[str], fresh: bool) -> Any:
        path = f"{ROOT / 'src'}:{ROOT}"  # the second for tests.live.catalogue
        full = dict(os.environ, PYTHONPATH=path, PYTHONUNBUFFERED="1", **env)
        code = textwrap.dedent(code)
        if fresh or before or not hasattr(os, "pidfd_open"):
            return subprocess.Popen(
                [*before, sys.executable, "-c", code],
                env=full,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # so that it ends with all its children
            )
        imports = self.IMPORTS
        if "torch" in code or "jax" in code:  # the first optimizer imports the compiler
            imports += ", torch, torch._dynamo"
        if "jax" in code:
            imports += ", jax"
        if imports not in self._running:
            self._running[imports] = Starter(f"import {imports}")
        return self._running[imports].start(self.PATIENT + code, full)

    def close(self) -> None:
        for starter in self._running.values():
            starter.close()


@pytest.fixture(scope="session")
def starters():
    made = Starters()
    yield made
    made.close()


class Program:
    """A program in a process of its own; `line` reads what it prints."""

    def __init__(self, process: Any) -> None:
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        """Return the next line of its output."""
        assert self.process.stdout is not None
        found = self.process.stdout.readline()
        if not found:
            raise AssertionError(f"the program ended: {self.process.communicate()[1]}")
        return found.strip()

    def say(self, text: str = "") -> None:
        """Write a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self, timeout: float = 250) -> str:
        """Wait until it has ended without an error; return its output."""
        out, err = self.process.communicate(timeout=timeout)
        assert self.process.returncode == 0, err
        return out

    def result(self, timeout: float = 250) -> Any:
        """Return the last line of its output, parsed as JSON."""
        return json.loads(self.end(timeout).splitlines()[-1])

    def errors(self) -> str:
        """Return what it wrote to stderr until its end."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def clean_up(self) -> None:
        """Kill it with its children, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self.process.wait()


@pytest.fixture
def programs(starters):
    """Start programs that end with the test."""
    started: list[Program] = []

    def start(
        code: str,
        env: dict[str, str] | None = None,
        before: Sequence[str] = (),
        fresh: bool = False,
    ) -> Program:
        started.append(Program(starters.start(code, env or {}, before, fresh)))
        return started[-1]

    yield start
    for program in started:
        program.clean_up()


@pytest.fixture
def run(programs, request):
    """Start a training program that knows where the session of the test listens."""

    def start(
        code: str, to: object = None, before: Sequence[str] = (), fresh: bool = False, **env: str
    ) -> Program:
        target = to if to is not None else request.getfixturevalue("server")
        where = target if isinstance(target, str) else str(target.address)
        return programs(code, {"TENSORTAP_SERVER": where, **env}, before, fresh)

    return start


class Serving:
    """A live session in a process of its own; `ask` evaluates an expression there."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.address = program.line()

    def ask(self, expression: str) -> Any:
        """Return the value of an expression in the process of the session."""
        self.program.say(expression)
        answer = json.loads(self.program.line())
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def written(self) -> int:
        """Return how many records have arrived."""
        return int(self.ask("server.history.written"))

    @property
    def pid(self) -> int:
        """The process of the session itself, in the numbers of this test."""
        return self.program.pid

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def stop(self) -> None:
        """SIGSTOP, and return when it has stopped."""
        self.program.signal(signal.SIGSTOP)
        wait_for(lambda: _state(self.pid) == "T")

    def go_on(self) -> None:
        """SIGCONT."""
        self.program.signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9."""
        self.program.kill()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


_SERVE = """
{prelude}
import gc, json, os, sys
import tensortap as tap
from tensortap.api import session as live
from tensortap.live import answers
server = live.start("127.0.0.1", {port}, {memory!r})
live._session = live.Session(server)
print(server.address, flush=True)
for line in sys.stdin:
    try:
        answer = {{"value": eval(line)}}
    except Exception as error:
        answer = {{"error": repr(error)}}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def serving(programs):
    """Start live sessions in processes of their own."""

    def start(
        memory: str = "256MB", port: int = 0, prelude: str = "", before: Sequence[str] = ()
    ) -> Serving:
        code = _SERVE.format(prelude=textwrap.dedent(prelude), port=port, memory=memory)
        return Serving(programs(code, before=before, fresh=bool(prelude)))

    return start


@pytest.fixture(name="wait_for")
def wait_for_fixture():
    return wait_for


def row(target: Server | Serving, pid: int | None = None) -> ClientRow:
    """Return the row of the session's only client, or of the one with that process id."""
    if isinstance(target, Server):
        clients = answers.overview(target).clients
    else:
        with RemoteSession(target.address) as view:
            clients = view.overview().clients
    found = [client for client in clients if pid in (None, client.pid)]
    assert len(found) == 1, clients
    return found[0]


@pytest.fixture(name="row")
def row_fixture():
    return row
