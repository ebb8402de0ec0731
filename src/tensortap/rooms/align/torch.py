"""The weights of torch modules, and the sums of their shards over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tensortap.core.errors import CaptureError, TensortapError
from tensortap.rooms.align.digest import Piece, Weight
from tensortap.rooms.align.rows import RING, Sums
from tensortap.rooms.track.torch.names import Names
from tensortap.values.torch.shards import local_shard


def named_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]] | None:
    """Return parameters and persistent buffers with their names; None for what is no module."""
    return _named(model) if isinstance(model, torch.nn.Module) else None


def _named(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    names = Names(model)
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module).__name__ == "FullyShardedDataParallel":
            raise TensortapError("model is sharded by FSDP1, which hides its weights: use FSDP2")
        temporary = getattr(module, "_non_persistent_buffers_set", ())
        for name, tensor in module.named_parameters(recurse=False, remove_duplicate=False):
            yield names.plain(f"{path}.{name}" if path else name), tensor
        for name, tensor in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in temporary:
                yield names.plain(f"{path}.{name}" if path else name), tensor


def pieces(tensor: Any) -> list[Piece] | None:
    """Return the part of a tensor that this rank has, without its history of autograd."""
    if not isinstance(tensor, torch.Tensor):
        return None
    if not hasattr(tensor, "device_mesh"):
        return [Piece(tensor.detach(), None)]
    if any(placement.is_partial() for placement in tensor.placements):
        raise CaptureError("its ranks have partial sums, not shards")
    return [Piece(*local_shard(tensor))]


def sum_over_ranks(weights: Sequence[Weight]) -> None:
    """Add up the sums of shards; each replica counts once."""
    meshes: dict[Any, list[Weight]] = {}
    for weight in weights:
        if hasattr(weight.tensor, "device_mesh"):
            meshes.setdefault(weight.tensor.device_mesh, []).append(weight)
    for mesh, members in meshes.items():
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            continue
        rows: list[int] = []
        for weight in members:
            pairs = zip(weight.tensor.placements, coordinate, strict=True)
            is_first = all(hasattr(placement, "dim") or not index for placement, index in pairs)
            rows.append(bool(weight.unread))
            rows += [number if is_first else 0 for sums in weight.sums for number in sums]
        # on a device of the mesh, as its backend needs it
        total = torch.tensor(rows, dtype=torch.int64, device=mesh.device_type)
        for dim in range(mesh.ndim):
            torch.distributed.all_reduce(total, group=mesh.get_group(dim))
            total %= 1 << 32
        found = iter(total.tolist())
        for weight in members:
            if next(found) and not weight.unread:
                weight.unread = "another rank could not read its part"
            weight.sums = [_next_sums(found) for _ in weight.sums]


def _next_sums(numbers: Iterator[int]) -> Sums:
    return tuple(next(numbers) for _ in range(RING))
