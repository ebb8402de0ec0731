"""Shards of several processes are assembled before they are compared."""

from __future__ import annotations

import os
import textwrap

import numpy as np
import pytest

import tensortap as tap
from tensortap.rooms.compare.runs import compare_runs
from tests.runs.conftest import ROOT

pytestmark = pytest.mark.slow

PARALLEL = """
    import os, sys, torch, torch.distributed as dist
    import tensortap as tap
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    rank, store = int(os.environ["RANK"]), sys.argv[1]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    for folder in ("parallel", "bug"):
        tap.init(folder)
        torch.manual_seed(0)
        for step in range(3):
            tap.step(step)
            weight, bias = torch.randn(10, 6), torch.randn(6)
            columns = distribute_tensor(weight, mesh, [Shard(1)])
            if folder == "bug" and step == 1 and rank == 2:
                columns._local_tensor.add_(0.5)
            tap.catch(columns, "weight")
            tap.catch(distribute_tensor(bias, mesh, [Replicate()]), "bias")
            parts = torch.chunk(weight, 4, 0)
            start = sum(len(part) for part in parts[:rank])
            tap.catch(parts[rank], "rows", shard=tap.core.record.Shard((10, 6), (start, 0)))
        assert tap.flush(60)
        dist.barrier()
        tap.finish()
    dist.destroy_process_group()
"""

ONE = """
    import torch, tensortap as tap
    tap.init("one")
    torch.manual_seed(0)
    for step in range(3):
        tap.step(step)
        weight, bias = torch.randn(10, 6), torch.randn(6)
        tap.catch(weight, "weight"); tap.catch(bias, "bias"); tap.catch(weight, "rows")
"""


DDP = """
    import os, sys, torch, torch.distributed as dist
    import tensortap as tap
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world)

    class Rotary(torch.nn.Module):
        def forward(self, length):
            return torch.outer(torch.arange(length), torch.ones(4)).cos()

    class Model(torch.nn.Module):
        def __init__(self, fault):
            super().__init__()
            self.rotary_emb, self.fault = Rotary(), fault
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.dead = torch.nn.ReLU()
        def forward(self, x):
            y = self.a(x) + self.rotary_emb(x.shape[1])
            return self.b(y + self.fault) + self.dead(-y.abs())

    for folder in ("right", "wrong")[:world]:
        tap.init(folder)
        torch.manual_seed(0)
        model = Model(0.3 if folder == "wrong" else 0.0)
        wrapped = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
        x = torch.randn(8, 3, 4)
        with tap.track(model, kind="activation") as tracker:
            wrapped(x.chunk(world)[rank]).square().mean().backward()
            tracker.step()
        assert tap.flush(60)
        dist.barrier() if world > 1 else None
        tap.finish()
"""


def test_outputs_without_a_batch_dimension_are_replicas(tmp_path, forks):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    run_in(tmp_path / "one", forks, DDP)
    run_in(tmp_path / "two", forks, DDP, str(tmp_path / "store"), world=2)
    (one,), (right,), (wrong,) = (
        list((tmp_path / name).iterdir()) for name in ("one/right", "two/right", "two/wrong")
    )
    report = compare_runs(one, right, rtol=1e-4)
    assert report, str(report)
    assert report.compared == 5
    for report in (compare_runs(one, wrong, rtol=1e-4), compare_runs(wrong, one, rtol=1e-4)):
        assert report.culprit == "culprit: b: everything before it agrees, its output does not"


def run_in(folder, forks, code, *args, world=None):
    program = folder / "program.py"
    program.write_text(textwrap.dedent(code))
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TENSORTAP_SERVER": "127.0.0.1:1"}
    environ |= {"XDG_CONFIG_HOME": str(folder)}
    codes = forks(program, environ, *args, world=world)
    assert codes == [0] * (world or 1), [p.read_text() for p in folder.glob("program.py.e*")]


@pytest.fixture(scope="module")
def one(tmp_path_factory, forks):
    """The run of a single process."""
    folder = tmp_path_factory.mktemp("one")
    run_in(folder, forks, ONE)
    (run,) = (folder / "one").iterdir()
    return run


@pytest.fixture(scope="module")
def parallel(tmp_path_factory, forks):
    """The runs of four processes, each with a part of every tensor: a right one and a wrong one."""
    folder = tmp_path_factory.mktemp("parallel")
    run_in(folder, forks, PARALLEL, str(folder / "store"), world=4)
    runs = [list((folder / name).iterdir()) for name in ("parallel", "bug")]
    (right,), (wrong,) = runs
    return right, wrong


def test_single_process_agrees_with_tensor_parallel(one, parallel):
    run, _ = parallel
    shard = next(iter(tap.open(run).records("weight"))).shard
    assert shard.global_shape == (10, 6)
    assert shard.placements == ("S(1)",)
    report = compare_runs(one, run)
    assert report, str(report)
    assert report.compared == 9
    assert not report.missing


def test_finds_a_differing_shard(one, parallel):
    report = compare_runs(one, parallel[1])
    assert not report
    assert (report.first.key.name, report.first.key.step) == ("weight", 1)
    assert report.first.comparison.mismatches == 20  # six columns in parts of two: rank 2 has two


def record_all(folder, parts):
    """A run whose ranks wrote these parts of 'x'."""
    from tensortap.capture.queue import Queue
    from tensortap.capture.ticket import Ticket
    from tensortap.core.record import Kind, Record
    from tensortap.runs.folders import end_run, make_run
    from tensortap.runs.sink import StoreSink
    from tensortap.values.snapshot import borrow

    run = make_run(folder, len(parts))
    for rank, (array, shard) in enumerate(parts):
        sink = Queue(StoreSink(run, rank), budget=1 << 28, overflow="newest", name="test")
        record = Record(
            "x", Kind.VALUE, 0, 0, 0, rank, len(parts), 0, "", str(array.dtype), array.shape,
            shard, None, borrow(array),
        )  # fmt: skip
        sink.write(record, Ticket(1), 0)
        sink.close()
    end_run(run)
    return run


def test_replicas_must_agree(tmp_path):
    x = np.arange(6.0)
    plain = record_all(tmp_path / "a", [(x, None)])
    same = tap.core.record.Shard((6,), (0,), ("R",))
    good = record_all(tmp_path / "b", [(x, same), (x, same)])
    bad = record_all(tmp_path / "c", [(x, same), (x + 1, same)])
    assert compare_runs(plain, good)
    report = compare_runs(plain, bad)
    assert "replicas of ranks 0 and 1 differ" in str(report.first)


def test_incomplete_shards(tmp_path):
    x = np.arange(6.0)
    plain = record_all(tmp_path / "a", [(x, None)])
    half = record_all(tmp_path / "b", [(x[:3], tap.core.record.Shard((6,), (0,)))])
    report = compare_runs(plain, half)
    assert "3 of 6 elements are in no shard" in str(report.first)
    beyond = record_all(tmp_path / "c", [(x, tap.core.record.Shard((6,), (3,)))])
    assert "outside" in str(compare_runs(plain, beyond).first)
