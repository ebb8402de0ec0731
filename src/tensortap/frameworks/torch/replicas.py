"""Find the tensors of a torch model that other ranks have as well.

DistributedDataParallel and the placements of a DTensor say so. Of any other tensor it is assumed,
and up to whoever compares them to find out: a norm beside tensor-parallel layers, a model whose
gradients the program averages itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed

from tensortap.frameworks.observing import ReplicatedTensor
from tensortap.frameworks.torch.names import Names
from tensortap.frameworks.torch.shards import observed
from tensortap.ranks import rank_and_world_size
from tensortap.record import Kind

Group = tuple[tuple[int, ...], bool]  # ranks, and whether it is certain

# of the batches that a rank has seen, unless batch norm is synchronized
_OF_BATCHES = ("running_mean", "running_var", "num_batches_tracked")


class Replicas:
    """The replicated tensors of one model."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root
        modules = list(root.modules())
        # its parameters are pieces of flat ones, which look like plain tensors
        self._flat = any(type(m).__name__ == "FullyShardedDataParallel" for m in modules)
        self._parallel: dict[int, tuple[int, ...]] = {}  # id of a tensor → ranks
        for module in modules:
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                self._add_parallel(module)
        meshes = [p.device_mesh for p in root.parameters() if hasattr(p, "device_mesh")]
        widest: Any = max(meshes, key=lambda mesh: mesh.ndim, default=None)
        self._others = _everyone() if widest is None else tuple(widest.mesh.flatten().tolist())

    def _add_parallel(self, module: torch.nn.parallel.DistributedDataParallel) -> None:
        ranks = tuple(distributed.get_process_group_ranks(module.process_group))
        own = getattr(module, "parameters_to_ignore", ())
        for name, tensor in (*module.module.named_parameters(), *module.module.named_buffers()):
            if name not in own:
                self._parallel[id(tensor)] = ranks

    def of(
        self,
        name: str,
        kind: Kind,
        tensor: torch.Tensor,
        parameter: torch.Tensor | None = None,
        tags: dict[str, str] | None = None,
    ) -> Iterator[ReplicatedTensor]:
        """Yield a tensor for each group of ranks that have it; `parameter` owns a state."""
        groups = self._groups(tensor, tensor if parameter is None else parameter)
        if groups and tensor.numel():
            description, local = observed(name, kind, tensor, tags=tags)
            for ranks, certain in groups:
                yield ReplicatedTensor(description, local, ranks, certain)

    def buffers(self) -> Iterator[ReplicatedTensor]:
        """Yield the buffers that do not depend on the batches of a rank."""
        synchronized = {
            id(buffer)
            for module in self._root.modules()
            if isinstance(module, torch.nn.SyncBatchNorm)
            for buffer in module.buffers(recurse=False)
        }
        for name, buffer in Names(self._root).buffers():
            if name.rpartition(".")[2] not in _OF_BATCHES or id(buffer) in synchronized:
                for found in self.of(name, Kind.VALUE, buffer):
                    # DDP broadcasts them before a step, which may then change them
                    yield found._replace(certain=hasattr(buffer, "device_mesh"))

    def _groups(self, tensor: Any, parameter: Any) -> list[Group]:
        groups: list[Group] = []
        if hasattr(tensor, "device_mesh"):
            groups.append((_replicas_of(tensor.device_mesh, tuple(tensor.placements)), True))
        elif self._flat:
            return []
        elif id(parameter) not in self._parallel or self._others != _everyone():
            groups.append((self._others, False))
        if id(parameter) in self._parallel:
            groups.append((self._parallel[id(parameter)], True))
        return [(ranks, certain) for ranks, certain in dict(groups).items() if len(ranks) > 1]


def _everyone() -> tuple[int, ...]:
    if distributed.is_available() and distributed.is_initialized():
        return tuple(distributed.get_process_group_ranks(distributed.group.WORLD))
    return tuple(range(rank_and_world_size()[1]))


@functools.lru_cache(maxsize=256)
def _replicas_of(mesh: Any, placements: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the ranks that have the same part of a DTensor; none for partial sums."""
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(each.is_partial() for each in placements):
        return ()
    chosen = (
        slice(None) if each.is_replicate() else at
        for each, at in zip(placements, coordinate, strict=True)
    )
    return tuple(mesh.mesh[tuple(chosen)].flatten().tolist())
