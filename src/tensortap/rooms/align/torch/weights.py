"""Weights of torch modules, and the sums of their shards over all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tensortap.core.errors import CaptureError, TensortapError
from tensortap.rooms.align.digest import Piece, Weight
from tensortap.rooms.align.rows import RING
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
    """Add up the sums of shards; replicas must agree."""
    meshes: dict[Any, list[Weight]] = {}
    for weight in weights:
        if hasattr(weight.tensor, "device_mesh"):
            meshes.setdefault(weight.tensor.device_mesh, []).append(weight)
    for mesh, members in meshes.items():
        if mesh.get_coordinate() is not None:
            _sum_over_mesh(mesh, members)


def _sum_over_mesh(mesh: Any, weights: list[Weight]) -> None:
    most = max(len(weight.sums) for weight in weights)
    rows = []
    for weight in weights:
        sums = weight.sums + [(0,) * RING] * (most - len(weight.sums))
        rows.append([bool(weight.unread), 0, *itertools.chain(*sums)])
    # on a device of the mesh, as its backend needs it
    total = torch.tensor(rows, dtype=torch.int64, device=mesh.device_type)
    for dim in range(mesh.ndim):
        parts = [torch.empty_like(total) for _ in range(mesh.size(dim))]
        torch.distributed.all_gather(parts, total, group=mesh.get_group(dim))
        every = torch.stack(parts)
        split = [hasattr(weight.tensor.placements[dim], "dim") for weight in weights]
        is_split = torch.tensor(split, device=total.device)
        differ = (every[:, :, 2:] != every[0, :, 2:]).any(dim=2).any(dim=0) & ~is_split
        total = torch.where(is_split[:, None], every.sum(0) % (1 << 32), every[0])
        total[:, :2] = every[:, :, :2].sum(0)
        total[:, 1] += differ
    for weight, (unread, differ, *numbers) in zip(weights, total.tolist(), strict=True):
        if unread:
            weight.unread = weight.unread or "another rank could not read its part"
        elif differ:
            weight.unread = "its replicas differ"
        found = iter(numbers)
        weight.sums = [tuple(itertools.islice(found, RING)) for _ in weight.sums]
