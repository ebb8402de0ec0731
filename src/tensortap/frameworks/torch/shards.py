"""Tensors of torch that are spread over ranks: this rank's part, and which part it is."""

from __future__ import annotations

from typing import Any

from tensortap.record import Shard


def local_of(tensor: Any) -> tuple[Any, Shard]:
    """The local part of a DTensor, and where in the whole it lies. No communication."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements = tuple(str(placement) for placement in tensor.placements)
    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = tensor._local_tensor
    if hasattr(local, "wait"):  # a collective that is still under way
        local = local.wait()
    return local.detach(), Shard(tuple(tensor.shape), tuple(offsets), placements)
