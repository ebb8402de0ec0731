"""A torch tensor as this rank has it: of a distributed one its own part, and which part it is."""

from __future__ import annotations

import torch

from tensortap.record import Kind, Shard
from tensortap.sources.observer import Seen

_DTYPES: dict[torch.dtype, str] = {}


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
    if type(local) is not torch.Tensor:
        local, shard, more = _local(local)
        tags = {**tags, **more} if more else tags
    dtype = _DTYPES.get(local.dtype) or _dtype_name(local.dtype)
    return Seen(name, kind, call, type_name, dtype, tuple(local.shape), shard, tags), local


def _dtype_name(dtype: torch.dtype) -> str:
    _DTYPES[dtype] = str(dtype).removeprefix("torch.")
    return _DTYPES[dtype]


def _local(tensor: torch.Tensor) -> tuple[torch.Tensor, Shard | None, dict[str, str]]:
    """This rank's part of a distributed tensor, and which part it is."""
    if not hasattr(tensor, "to_local"):
        return tensor, None, {}
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements = tuple(str(placement) for placement in tensor.placements)
    tags = {"placements": " ".join(placements), "mesh": str(tuple(tensor.device_mesh.shape))}
    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = tensor.to_local()
    if hasattr(local, "wait"):
        local = local.wait()  # a collective under way
    return local.detach(), Shard(tuple(tensor.shape), tuple(offsets), placements), tags
