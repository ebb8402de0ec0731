"""Device meshes of torch: where this rank is, and which ranks share a batch."""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import torch

from tensortap.values.torch.private import root_mesh

# dimensions whose ranks have different batches or parts of them, by the names that people give them
_OWN_BATCH = re.compile(
    r".*dp|data|batch|replicate|shard|ep|experts?|cp|context|pp|pipe(line)?|stages?"
)


class TensorMesh(NamedTuple):
    """The ranks over which the layers of a model are split; all of them have the same batch."""

    tag: str = ""  # empty if the model is not tensor parallel
    batch: str = ""  # the first of these ranks; other ranks have other batches


@functools.lru_cache(maxsize=4096)
def mesh_tag(mesh: Any) -> str:
    """Return where this rank is in the mesh of the whole job: ``"dp=0/2 tp=1/4"``."""
    whole = root_mesh(mesh)
    coordinate = whole.get_coordinate()
    if coordinate is None:
        whole, coordinate = mesh, mesh.get_coordinate() or [-1] * mesh.ndim
    names = whole.mesh_dim_names or [f"dim{i}" for i in range(whole.ndim)]
    places = zip(names, coordinate, whole.mesh.shape, strict=True)
    return " ".join(f"{name}={index}/{size}" for name, index, size in places)


@functools.lru_cache(maxsize=4096)
def first_rank(mesh: Any) -> str:
    """Return the first rank of a mesh: ranks of other meshes have other batches."""
    return str(int(mesh.mesh.min()))


def tensor_mesh(root: torch.nn.Module) -> TensorMesh:
    """Return the mesh of a tensor-parallel model; an empty one for any other model."""
    parameters = [each for each in root.parameters() if hasattr(each, "device_mesh")]
    by_fsdp = is_sharded(root)
    found = []
    for mesh in {each.device_mesh: None for each in parameters}:
        coordinate = mesh.get_coordinate()
        if coordinate is None:  # this rank does not belong to it
            continue
        own = [each.placements for each in parameters if each.device_mesh == mesh]
        outer = sharded_dimensions(own, mesh.ndim) if by_fsdp else 0
        names = mesh.mesh_dim_names or [""] * mesh.ndim
        at = tuple(
            coordinate[dim] if dim < outer or _has_own_batch(name) else slice(None)
            for dim, name in enumerate(names)
        )
        found.append((mesh.mesh[at], mesh))
    ranks, mesh = max(found, key=lambda each: each[0].numel(), default=(torch.empty(0), None))
    if not ranks.ndim or mesh is None:
        return TensorMesh()
    return TensorMesh(mesh_tag(mesh), str(int(ranks.min())))


def is_sharded(root: torch.nn.Module) -> bool:
    """Return whether FSDP2 shards a model."""
    return any(map(is_sharded_module, root.modules()))


def is_sharded_module(module: torch.nn.Module) -> bool:
    """Return whether `fully_shard` was applied to this very module."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__bases__)


def sharded_dimensions(placements: list[Any], ndim: int) -> int:
    """Return over how many dimensions FSDP splits parameters; it puts its own in front."""
    split = [all(hasattr(each[dim], "dim") for each in placements) for dim in range(ndim)]
    return split.index(True) + 1 if True in split else ndim


def _has_own_batch(name: str) -> bool:
    return any(_OWN_BATCH.fullmatch(part) for part in re.split(r"[^a-z]+", name.lower()))
