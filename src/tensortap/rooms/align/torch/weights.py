"""Weights of torch modules, sums of their shards over all ranks, and inputs that are perturbed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tensortap.core.errors import CaptureError, TensortapError
from tensortap.rooms.align.digest import Piece, Weight
from tensortap.rooms.align.perturb import Perturbation
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


# -- inputs that differ in the last bit ------------------------------------------------------


@contextlib.contextmanager
def perturb_inputs(model: Any, found: Perturbation) -> Iterator[bool]:
    """Perturb what enters a module; tell whether it is one."""
    if not isinstance(model, torch.nn.Module):
        yield False
        return
    generators: dict[torch.device, torch.Generator] = {}

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if value.device not in generators:  # not the global ones: dropout stays the same
            generators[value.device] = torch.Generator(value.device).manual_seed(found.seed)
        found.tensors += 1
        device = value.device.type
        is_autocast = torch.is_autocast_enabled(device)
        coarse = torch.get_autocast_dtype(device) if is_autocast else value.dtype
        return neighbors(value, coarse, generators[value.device])

    def before(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(moved, (args, kwargs))

    def after(module: torch.nn.Module, args: Any, output: Any) -> Any:
        return tree_map(moved, output)

    # first of all hooks, so that others see what the model computes with
    handles = [model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)]
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    tables = [each for each in model.modules() if isinstance(each, embeddings)]
    handles += [each.register_forward_hook(after, prepend=True) for each in tables]
    try:
        yield True
    finally:
        for handle in handles:
            handle.remove()


def neighbors(
    x: torch.Tensor, dtype: torch.dtype, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Move each number up or down by a unit in its last place in a dtype; zeros stay."""
    with torch.no_grad():
        plain = x.detach().to(dtype).contiguous()
        bits = plain.view(_INTEGERS[plain.element_size()])
        step = torch.randint(0, 2, x.shape, generator=generator, device=x.device, dtype=bits.dtype)
        found = (bits + 2 * step - 1).view(dtype)
        stays = (plain == 0) | ~torch.isfinite(plain) | ~torch.isfinite(found)
        difference = torch.where(stays, torch.zeros_like(plain), found - plain).to(x.dtype)
    return x + difference  # so that gradients pass


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
