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
_modules = sys.modules


def rank_and_world_size() -> tuple[int, int]:
    """From torch.distributed or JAX if one of them is initialised, else from the launcher."""
    if "torch.distributed" in _modules:
        distributed = _modules["torch.distributed"]
        try:
            if distributed.is_initialized():
                return distributed.get_rank(), distributed.get_world_size()
        except AttributeError:
            pass  # a build of torch without its distributed part, or one being imported
    if "jax.distributed" in _modules:
        jax = _modules["jax"]
        try:
            if jax.distributed.is_initialized():
                return jax.process_index(), jax.process_count()
        except AttributeError:
            pass  # an older JAX cannot be asked without starting its backends
    return _launched or launcher()


_launched: tuple[int, int] | None = None


def launcher() -> tuple[int, int]:
    """What the launcher has put into the environment; looked up once, it does not change."""
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
