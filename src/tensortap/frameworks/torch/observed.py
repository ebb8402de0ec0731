"""A torch tensor as a hook reports it: of a DTensor, this rank's part."""

from __future__ import annotations

import torch

from tensortap.frameworks.observing import Observed
from tensortap.frameworks.torch.shards import local_shard
from tensortap.frameworks.torch.tensors import dtype_name
from tensortap.record import Kind


def observed(
    name: str,
    kind: Kind,
    tensor: torch.Tensor,
    call: int = 0,
    type_name: str = "",
    tags: dict[str, str] | None = None,
) -> tuple[Observed, torch.Tensor]:
    """Return the description of a tensor, and the local, detached tensor itself.

    >>> description, local = observed("fc", Kind.WEIGHT, torch.ones(2, 3, requires_grad=True))
    >>> description.dtype, description.shape, local.requires_grad
    ('float32', (2, 3), False)
    """
    local = tensor.detach()
    tags = tags or {}
    shard = None
    if type(local) is not torch.Tensor and hasattr(local, "to_local"):
        mesh = str(tuple(local.device_mesh.shape))
        local, shard = local_shard(local)
        tags = {**tags, "placements": " ".join(shard.placements), "mesh": mesh}
    dtype, shape = dtype_name(local.dtype), tuple(local.shape)
    return Observed(name, kind, call, type_name, dtype, shape, shard, tags), local
