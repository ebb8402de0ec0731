"""The rank of this process and the world size, without importing any framework."""

from __future__ import annotations

import os
import sys

_VARIABLES = (
    ("RANK", "WORLD_SIZE"),  # torchrun, accelerate, deepspeed
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
)
_modules = sys.modules


def rank_and_world_size() -> tuple[int, int]:
    """Return rank and world size from torch.distributed, JAX or the launcher."""
    if "torch.distributed" in _modules:
        distributed = _modules["torch.distributed"]
        try:
            if distributed.is_initialized():
                return distributed.get_rank(), distributed.get_world_size()
        except AttributeError:
            pass  # torch was built without it, or is being imported
    if "jax.distributed" in _modules:
        jax = _modules["jax"]
        try:
            if jax.distributed.is_initialized():
                return jax.process_index(), jax.process_count()
        except AttributeError:
            pass  # an older JAX, which would start its backends to answer
    return _launched or launcher()


_launched: tuple[int, int] | None = None


def launcher() -> tuple[int, int]:
    """Read rank and world size from the environment, and remember them."""
    global _launched
    _launched = _read_environment()
    return _launched


def _read_environment() -> tuple[int, int]:
    environ = os.environ
    for rank, size in _VARIABLES:
        if rank in environ and size in environ:
            try:
                return int(environ[rank]), int(environ[size])
            except ValueError:
                continue
    return 0, 1
