"""`tensortap run` on jobs of several processes with gloo, which the program starts by itself."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import tensortap as tap

pytestmark = pytest.mark.slow

PROGRAM = """
import os, subprocess, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mode = sys.argv[1]
world = 3 if mode == "nan" else 2
if "RANK" not in os.environ:
    started = [
        subprocess.Popen([sys.executable, "-u", __file__, mode], env=os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(world)}) for rank in range(world)]
    sys.exit(max(process.wait() for process in started))

rank = int(os.environ["RANK"])
place = f"file://{os.getcwd()}/store"
dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world)
pair = dist.new_group([0, 1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
if mode == "nan" and rank < 2:
    model = nn.parallel.DistributedDataParallel(model, process_group=pair)
elif mode == "tensor parallel":
    mesh = init_device_mesh("cpu", (world,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
elif mode != "nan":
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(rank if mode in ("nan", "local", "right") else 5)
for step in range(6 if mode != "nan" or rank < 2 else 0):
    x = torch.randn(4, 4)
    if mode == "nan" and rank == 1 and step == 3:
        x[1] = float("nan")
    optimizer.zero_grad()
    (model(x) - 4).square().mean().backward()
    if mode != "nan":
        gradients = [parameter.grad for parameter in model.parameters()]
        squares = sum(each.to_local().square().sum() for each in gradients)
        if mode != "local":
            dist.all_reduce(squares)  # with tensor parallelism, the last bias counts twice
        if rank == 0:
            whole = sum(each.full_tensor().square().sum() for each in gradients).sqrt()
            print("norm", whole.item())
        else:
            [each.full_tensor() for each in gradients]
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, squares.sqrt())
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


def verdict(tmp_path, mode):
    (tmp_path / "train.py").write_text(PROGRAM)
    words = [
        sys.executable,
        "-m",
        "tensortap",
        "run",
        "--every",
        "1",
        "--analyses",
        "train.py",
        mode,
    ]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (made,) = (tmp_path / "runs").iterdir()
    return tap.open(made), done


def test_a_nan_that_came_from_another_rank(tmp_path):
    run, done = verdict(tmp_path, "nan")
    made, received = [alert for alert in run.alerts() if alert.rule == "nan"]
    assert (made.rank, made.name, made.step) == (1, "0", 3)
    assert (received.rank, received.name) == (0, "0.weight")
    assert received.message.endswith(
        "it came through communication from rank 1, where 0 (Activation) had it before"
    )
    assert "● nan: 0 since step 3, rank 1" in done.stderr
    assert "no model was tracked on rank 2: nothing is known there" in done.stderr


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("right", ""),
        ("local", "ranks have clipped by norms from"),
        ("tensor parallel", "gradients are clipped by a norm of"),
    ],
)
def test_norms_of_sharded_gradients(tmp_path, mode, says):
    run, done = verdict(tmp_path, mode)
    found = [alert.message for alert in run.alerts() if alert.rule == "clip_norm"]
    assert len(found) == bool(says)
    assert all(message.startswith(says) for message in found)
    assert ("● clip_norm: model since step 0" in done.stderr) == bool(says)
    printed = [float(line.split()[1]) for line in done.stdout.splitlines() if "norm" in line]
    whole = run.metrics("model.grad_norm")
    assert set(whole["rank"]) == {0, 1}
    for rank in (0, 1):
        numbers = whole[whole["rank"] == rank]["model.grad_norm"]
        np.testing.assert_allclose(numbers, printed, rtol=1e-5)


def test_one_rank_prints_the_verdict_on_all(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    words = [sys.executable, "-m", "tensortap", "run", "--every", "1", "train.py", "local"]
    ranks = [
        subprocess.Popen(
            words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=os.environ | {
                "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": "2",
                "TENSORTAP_JOB": "ranks", "MASTER_ADDR": "x", "MASTER_PORT": "1",
            },
        )
        for rank in range(2)
    ]  # fmt: skip
    first, second = (rank.communicate(timeout=600)[1] for rank in ranks)
    assert "rules" in first
    assert "tensortap view" in first
    assert "tensortap" not in second
