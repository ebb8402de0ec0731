"""Replays of distributed jobs: `tensortap replay` starts as many processes, and all run in step."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tensortap as tap
from tensortap.errors import NotFound
from tests.commands import type_in

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ASKED = 7
PROGRAM = f"""
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import tensortap as tap

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, kind = dist.get_rank(), sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.1), nn.Tanh(), nn.Linear(5, 3))
if kind == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
else:
    for layer in (model[0], model[3]):
        fully_shard(layer)
    fully_shard(model)
inner = getattr(model, "module", model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(rank)
number = -1

def train_step(x):
    optimizer.zero_grad()
    error = model(x) - x.sum(1, keepdim=True)
    loss = error.square().mean()
    loss.backward()
    if number == {ASKED}:
        gradient = inner[0].weight.grad
        torch.save([error.detach(), getattr(gradient, "full_tensor", lambda: gradient)()],
                   f"expected_{{kind}}{{rank}}.pt")
    optimizer.step()
    return loss.detach()

# with FSDP2 rank 1 has fewer snapshots, as if its disk were slow
tap.init(f"runs_{{kind}}", blackbox={{"every": 8}} if rank and kind == "fsdp2" else True)
step = tap.blackbox(train_step, model, optimizer, every=5)
for number in range(9):
    step(torch.randn(6, 4))
tap.finish()
dist.destroy_process_group()
"""


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text(PROGRAM)
    return folder


def run_of(project, kind):
    """Return the run of a job, which is made when a test first asks for it."""
    if not (project / f"runs_{kind}").exists():
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        subprocess.run([*launch, "--nproc-per-node=2", "train.py", kind], cwd=project,
                       env=environment(), timeout=100, check=True)  # fmt: skip
    (run,) = [path for path in (project / f"runs_{kind}").iterdir() if path.name[0] != "."]
    return run


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_every_rank_is_replayed(project, kind):
    run = run_of(project, kind)
    code, printed, said = type_in(
        "replay", run, "--step", ASKED, "--probe", "train_step.error",
        "--probe", "0.weight:gradient", "--yes", "--json", cwd=project, **environment(),
    )  # fmt: skip
    assert code == 0, said
    answer = json.loads(printed)
    assert answer["same"]
    assert "on each of 2 ranks" in answer["text"]
    first = 5 if kind == "ddp" else 0
    assert (answer["snapshot"], answer["replayed"]) == (first, ASKED - first + 2)
    found = tap.open(answer["run"])
    for rank in range(2):
        error, gradient = torch.load(project / f"expected_{kind}{rank}.pt")
        assert torch.equal(found.get("train_step.error", step=ASKED, rank=rank), error)
        seen = np.asarray(found.get("0.weight:gradient", step=ASKED, rank=rank))
        whole = gradient.numpy()
        assert np.array_equal(seen, whole if kind == "ddp" else np.array_split(whole, [3])[rank])


def test_other_numbers_of_ranks_are_one_sentence(project, tmp_path):
    run = shutil.copytree(run_of(project, "ddp"), tmp_path / "run")
    model = torch.nn.Linear(1, 1)
    box = tap.blackbox(lambda x: model(x).mean(), model)
    with pytest.raises(NotFound, match="has 2 ranks, and this program 1: start as many processes"):
        tap.open(run).replay(ASKED, "0", step_fn=box)
    for file in (run / "blackbox/00001").glob("*.steps"):
        file.unlink()
    code, _, said = type_in("replay", run, "--step", ASKED, "--probe", "0", cwd=project)
    assert code == 2
    assert f"step {ASKED} of {run} cannot be replayed on rank 1: the run has no steps" in said
