"""Rank and world size of torch.distributed, JAX or the launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import torch.distributed as dist

from tensortap.core import ranks
from tensortap.core.ranks import rank_and_world_size

LAUNCHERS = ("RANK", "WORLD_SIZE", "SLURM", "OMPI", "JAX")


@pytest.fixture
def launched(monkeypatch):
    """Return a function that sets the variables of a launcher, and no others."""
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(ranks, "_launched", None)
    return lambda **env: [monkeypatch.setenv(*each) for each in env.items()]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"JAX_PROCESS_ID": "5", "JAX_NUM_PROCESSES": "6"}, (5, 6)),
        ({"RANK": "3"}, (0, 1)),
        ({"RANK": "x", "WORLD_SIZE": "8", "SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, (2, 4)),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (1, 2)),
    ],
)
def test_reads_the_variables_of_the_launcher(launched, env, expected):
    launched(**env)
    assert rank_and_world_size() == expected


def test_prefers_initialized_torch_distributed(launched, tmp_path):
    launched(RANK="3", WORLD_SIZE="8")
    assert not jax.distributed.is_initialized()
    assert rank_and_world_size() == (3, 8)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        assert rank_and_world_size() == (0, 1)
    finally:
        dist.destroy_process_group()
    assert rank_and_world_size() == (3, 8)


def test_imports_no_framework():
    code = (
        "import sys; from tensortap.core.ranks import rank_and_world_size as ask; ask();"
        "sys.exit(bool({'torch', 'jax', 'numpy'} & set(sys.modules)))"
    )
    source = str(Path(__file__).parents[2] / "src")
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": source}, check=True)
