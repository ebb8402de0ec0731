"""A torch tensor as this rank has it: of a distributed one its own part, and which part it is."""

from __future__ import annotations

import torch

from tensortap.frameworks.torch.shards import local_shard
from tensortap.frameworks.torch.tensors import dtype_name
from tensortap.record import Kind
from tensortap.sources.observer import Seen


def seen_of(
    name: str,
    kind: Kind,
    tensor: torch.Tensor,
    call: int = 0,
    type_name: str = "",
    tags: dict[str, str] | None = None,
) -> tuple[Seen, torch.Tensor]:
    """What a tensor is, and the one to look at.

    >>> seen, local = seen_of("fc", Kind.WEIGHT, torch.ones(2, 3, requires_grad=True))
    >>> seen.dtype, seen.shape, local.requires_grad
    ('float32', (2, 3), False)
    """
    local = tensor.detach()
    tags = tags or {}
    shard = None
    if type(local) is not torch.Tensor and hasattr(local, "to_local"):
        mesh = str(tuple(local.device_mesh.shape))
        local, shard = local_shard(local)
        tags = {**tags, "placements": " ".join(shard.placements), "mesh": mesh}
    dtype = dtype_name(local.dtype)
    return Seen(name, kind, call, type_name, dtype, tuple(local.shape), shard, tags), local
