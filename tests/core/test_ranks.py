"""Rank and world size, in fresh interpreters, because they are looked up once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = str(Path(__file__).parents[2] / "src")
LAUNCHERS = ("RANK", "WORLD_SIZE", "SLURM", "OMPI", "JAX")
ASK = "from tensortap.core.ranks import rank_and_world_size as ask; print(*ask())"


def ask(code=ASK, **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": SOURCE, **env},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "0 1"),
        ({"RANK": "3", "WORLD_SIZE": "8"}, "3 8"),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, "2 4"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "1 2"),
        ({"JAX_PROCESS_ID": "5", "JAX_NUM_PROCESSES": "6"}, "5 6"),
        ({"RANK": "3"}, "0 1"),
        ({"RANK": "x", "WORLD_SIZE": "8", "SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, "2 4"),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, "1 2"),
    ],
)
def test_reads_the_variables_of_the_launcher(env, expected):
    assert ask(**env) == expected.split()


@pytest.mark.slow
def test_prefers_initialized_torch_distributed(tmp_path):
    code = f"""
import torch.distributed as dist
from tensortap.core.ranks import rank_and_world_size as ask
print(*ask())
dist.init_process_group("gloo", init_method="file://{tmp_path}/meet", rank=0, world_size=1)
print(*ask())
dist.destroy_process_group()
print(*ask())
"""
    assert ask(code, RANK="3", WORLD_SIZE="8") == "3 8 0 1 3 8".split()


@pytest.mark.slow
def test_ignores_uninitialized_jax():
    assert ask("import jax; " + ASK, RANK="3", WORLD_SIZE="8") == ["3", "8"]


def test_imports_no_framework():
    code = ASK + "; import sys; print([m for m in ('torch', 'jax', 'numpy') if m in sys.modules])"
    assert ask(code) == ["0", "1", "[]"]
