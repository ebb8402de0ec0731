"""Parts of tensors that are spread over ranks: of a DTensor, this rank's part and its place."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from tensortap.core.record import Shard


def local_shard(tensor: Any) -> tuple[Any, Shard]:
    """Return the local part of a DTensor and its place in the whole, without communication."""
    with torch.no_grad():
        local = waited(tensor.to_local())
    return local.detach(), shard_of(tensor, tuple(tensor.placements))


def waited(tensor: Any) -> Any:
    """Return a tensor once the collective that computes it is done."""
    return tensor.wait() if hasattr(tensor, "wait") else tensor


def shard_of(tensor: Any, placements: tuple[Any, ...]) -> Shard:
    """Return which part of a DTensor this rank has with some placements."""
    mesh = tensor.device_mesh
    coordinate, shape = mesh.get_coordinate(), tuple(tensor.shape)
    offsets: tuple[int, ...] = ()
    if coordinate is not None:  # this rank belongs to the mesh
        offsets = _offsets(shape, tuple(mesh.shape), tuple(coordinate), placements)
    return Shard(shape, offsets, tuple(str(placement) for placement in placements))


@functools.lru_cache(maxsize=4096)
def _offsets(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Any, ...],
) -> tuple[int, ...]:
    """Return where a shard begins in each dimension; the length of the dimension if it is empty."""
    rows: list[Sequence[int]] = [range(length) for length in shape]
    for parts, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is None:  # replicated, or partial sums
            continue
        # FSDP after tensor parallelism interleaves its shards with those that exist already
        pieces = getattr(placement, "split_factor", 1)
        found = [_chunk(_chunk(rows[dim], pieces, i), parts, index) for i in range(pieces)]
        rows[dim] = found[0] if pieces == 1 else [row for piece in found for row in piece]
    return tuple([part[0] if part else size for part, size in zip(rows, shape, strict=True)])


def _chunk(rows: Sequence[int], parts: int, index: int) -> Sequence[int]:
    size = -(-len(rows) // parts)  # as torch.chunk: all but the last are equally long
    return rows[size * index : size * (index + 1)]
