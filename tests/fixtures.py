"""Fixtures shared by the tests of sources and frameworks."""

from __future__ import annotations

import json
import os
import socket
import textwrap
from pathlib import Path

import pytest

from tensortap.capture.pipeline import pipeline
from tensortap.core.record import Kind
from tests.forks import Forks, Starter

ROOT = Path(__file__).parents[1]


@pytest.fixture
def no_errors():
    """Fail the test if tensortap has counted an error."""
    before = pipeline.receipt().reasons["error"]
    yield
    assert pipeline.receipt().reasons["error"] == before


@pytest.fixture
def errors():
    """Return a function that counts the errors inside tensortap since the test began."""
    before = pipeline.receipt().reasons["error"]
    return lambda: pipeline.receipt().reasons["error"] - before


@pytest.fixture
def open_run(tmp_path):
    """Open a run for the test; return its path."""
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
    """Return the records of steps; test_initial_weights.py looks at those from before the first."""
    return lambda tracker: Found([r for r in tracker.records if r.step >= 0])


# an optimizer and DDP import the last of torch
IMPORTS = """
import h5py, pandas, plotly.graph_objects, pyarrow.parquet
import torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor, torch.nn.parallel
import tensortap, tensortap.cli.main, tensortap.live.sink, tensortap.rooms.compare.report
import tensortap.rooms.provenance.runtime, tensortap.rooms.trace.hdf5
import tensortap.rooms.track.torch.track, tensortap.rooms.track.track, tensortap.runs.init
import tensortap.runs.run_reader, tensortap.runs.sink, tensortap.stats.summarize
import tensortap.values.numpy.adapter, tensortap.values.torch.adapter
tensortap.rooms.provenance.runtime.packages_info()  # the next call knows most of it
"""


@pytest.fixture(scope="session")
def starter():
    """Start the process that programs are forked from."""
    started = Starter(IMPORTS)
    yield started
    started.close()


@pytest.fixture(scope="session")
def forks(starter):
    """Run files in forks of that process, one or several ranks of each."""
    return Forks(starter)


class Ranks:
    """Runs programs in several ranks over gloo; returns the last line of each, parsed as JSON."""

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

    def __init__(self, folder, forks):
        self.folder = folder
        self.forks = forks

    def printed(self, code, world, **env):
        """Run a program and return the output of each rank."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        # in a file: functions are traced by their source
        name = self.folder / f"program_{port}.py"
        name.write_text("\n".join(textwrap.dedent(piece) for piece in (self.HEAD, code)))
        full = {
            **os.environ, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1",
            "TENSORTAP_SERVER": "127.0.0.1:1", **env,
        }  # fmt: skip
        codes = self.forks(name, full, world=world)
        printed, self.errors = (
            [Path(f"{name}.{kind}{rank}").read_text() for rank in range(world)] for kind in "oe"
        )
        assert codes == [0] * world, (printed, self.errors)
        return printed

    def __call__(self, code, world=2, **env):
        printed = self.printed(code + textwrap.dedent(self.TAIL), world, **env)
        return [json.loads(text.splitlines()[-1]) for text in printed]


@pytest.fixture(scope="module")
def gloo(tmp_path_factory, forks):
    """Run a program in several ranks."""
    return Ranks(tmp_path_factory.mktemp("ranks"), forks)


@pytest.fixture(scope="session")
def run_program(forks):
    """Run a program in a folder and return its output."""

    def run(folder: Path, code: str, *arguments: str, env: dict[str, str] | None = None) -> str:
        program = folder / "program.py"
        program.write_text(textwrap.dedent(code))
        codes = forks(program, {**os.environ, **(env or {})}, *arguments)
        assert codes == [0], Path(f"{program}.e0").read_text()
        return Path(f"{program}.o0").read_text()

    return run


@pytest.fixture(scope="session")
def typed(forks):
    """Type `tensortap …` in a folder; return how it ended and what it printed."""

    def typed(folder: Path, *words: object) -> tuple[int, str, str]:
        program = folder / "typed.py"
        program.write_text("from tensortap.cli.main import main\nmain()\n")
        (code,) = forks(program, dict(os.environ), *map(str, words))
        out, err = (Path(f"{program}.{kind}0").read_text() for kind in "oe")
        return code, out, err

    return typed
