"""What the tests of tracking share: a quiet session, and short ways to look at records."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tensortap.record import Kind
from tensortap.session import session

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nobody_listens(monkeypatch, tmp_path_factory):
    """No live session and no settings of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith("TENSORTAP_") or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))


@pytest.fixture
def no_errors():
    """Nothing went wrong inside tensortap, unnoticed."""
    before = session.receipt().errors
    yield
    assert session.receipt().errors == before


@pytest.fixture
def errors():
    """How many errors inside tensortap were counted since the test began."""
    before = session.receipt().errors
    return lambda: session.receipt().errors - before


@pytest.fixture
def open_run(tmp_path):
    """A run that is open while the test runs; its path."""
    import tensortap as tap

    path = tap.init(tmp_path / "runs")
    yield path
    tap.finish()


class Found:
    """Records by name and kind."""

    def __init__(self, records):
        self.all = list(records)

    def of(self, kind, name=None, step=None):
        kind = Kind(kind)
        return [
            r
            for r in self.all
            if r.kind is kind
            and (name is None or r.name == name)
            and (step is None or r.step == step)
        ]

    def one(self, kind, name, step=0):
        (found,) = self.of(kind, name, step)
        return found

    def names(self, kind, step=None):
        return [r.name for r in self.of(kind, step=step)]


@pytest.fixture
def found():
    return lambda tracker: Found(tracker.records)


class Ranks:
    """Programs in several ranks over gloo; what each has printed last, as JSON."""

    HEAD = """
    import json, os, sys, torch, torch.distributed as dist
    from torch import nn
    import tensortap as tap
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    """
    TAIL = """
    print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    """

    def __init__(self, folder):
        self.folder = folder
        self.started = []

    def start(self, code, world, *, tail=True, **env):
        """The processes of a program, started."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # in a file: functions are traced by their source
        name = self.folder / f"program_{port}.py"
        pieces = [self.HEAD, code, self.TAIL if tail else ""]
        name.write_text("\n".join(textwrap.dedent(piece) for piece in pieces))
        processes = []
        for rank in range(world):
            full = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1",
                "TENSORTAP_SERVER": "127.0.0.1:1", **env,
            }  # fmt: skip
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(name)], env=full, cwd=self.folder, text=True,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )
            )  # fmt: skip
        self.started += processes
        return processes

    def __call__(self, code, world=2, **env):
        processes = self.start(code, world, **env)
        done = [process.communicate(timeout=280) for process in processes]
        assert [p.returncode for p in processes] == [0] * world, done
        self.errors = [err for _, err in done]
        return [json.loads(out.splitlines()[-1]) for out, _ in done]


@pytest.fixture(scope="module")
def gloo(tmp_path_factory):
    """Run a program in several ranks."""
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    for process in ranks.started:
        if process.poll() is None:
            process.kill()
            process.communicate()
