"""Which rank this process is, and of how many: asked, never assumed, and nothing imported."""

from __future__ import annotations

import functools
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
    """From torch.distributed or JAX if one of them is initialised, else from the launcher."""
    distributed = _modules.get("torch.distributed")
    if distributed is not None:
        # absent in builds of torch that have no distributed part
        initialised = getattr(distributed, "is_initialized", None)
        if initialised is not None and initialised():
            return distributed.get_rank(), distributed.get_world_size()
    jax = _modules.get("jax.distributed")
    if jax is not None:
        initialised = getattr(jax, "is_initialized", None)
        if initialised is not None and initialised():
            return _modules["jax"].process_index(), _modules["jax"].process_count()
    return launcher()


@functools.cache
def launcher() -> tuple[int, int]:
    """What the launcher has put into the environment; it does not change afterwards."""
    environ = os.environ
    for rank, size in _VARIABLES:
        if rank in environ and size in environ:
            try:
                return int(environ[rank]), int(environ[size])
            except ValueError:
                continue
    return 0, 1
