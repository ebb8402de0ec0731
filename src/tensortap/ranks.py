"""Which rank this process is, and of how many: asked, never assumed, and nothing imported."""

from __future__ import annotations

import os
import sys

_VARIABLES = (
    ("RANK", "WORLD_SIZE"),  # torchrun, accelerate, deepspeed
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
)


def rank_and_world_size() -> tuple[int, int]:
    """From torch.distributed or JAX if one of them is initialised, else from the launcher."""
    modules = sys.modules
    distributed = modules.get("torch.distributed")
    if (
        distributed is not None
        # present but not built in some torch packages
        and distributed.is_available()
        and distributed.is_initialized()
    ):
        return distributed.get_rank(), distributed.get_world_size()
    jax = modules.get("jax")
    if jax is not None:
        initialised = getattr(getattr(jax, "distributed", None), "is_initialized", None)
        if initialised is not None and initialised():
            return jax.process_index(), jax.process_count()
    return _from_launcher()


def _from_launcher() -> tuple[int, int]:
    environ = os.environ
    for rank, size in _VARIABLES:
        if rank in environ and size in environ:
            try:
                return int(environ[rank]), int(environ[size])
            except ValueError:
                continue
    return 0, 1
