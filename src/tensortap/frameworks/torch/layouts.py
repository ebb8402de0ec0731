"""Which part of the whole the tensors of a tensor-parallel model are.

A parallel layer computes a DTensor and hands on its local tensor, so the layout is known only
before its own output hook has run. Modules that follow keep the layout of their input if they keep
its shape. Every other value has the placement ``"?"``: compare must not take it for a whole.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from tensortap.frameworks.observing import tensors_in
from tensortap.frameworks.torch.shards import shard_of
from tensortap.record import Shard

UNKNOWN = "?"


class KnownLayout(NamedTuple):
    """A tensor of this step and the part that it is."""

    tensor: Any  # a weak reference
    shard: Shard


class Layouts:
    """The layouts of the outputs of one model; `mesh` is empty if it is not tensor parallel."""

    def __init__(self, root: torch.nn.Module) -> None:
        self.mesh, self._batch = tensor_mesh(root)
        self._computed: dict[str, Any] = {}  # DTensors, until the module's last hook
        self._known: dict[int, KnownLayout] = {}

    def end_step(self) -> None:
        """Forget the tensors of the step."""
        self._known.clear()

    def computed(self, name: str, output: Any) -> None:
        """Take the output of a parallel layer before the layer's own hook makes it local."""
        if hasattr(output, "device_mesh"):
            self._computed[name] = output.detach()

    def of(
        self, name: str, tensor: torch.Tensor, inputs: Any
    ) -> tuple[Shard | None, dict[str, str]]:
        """Return which part an output is, if that is known, and its tags."""
        if not self.mesh or hasattr(tensor, "device_mesh"):
            return None, {}
        whole = self._computed.pop(name, None)
        shard = self._shard(tensor) if whole is None else _inferred(whole, tensor)
        if shard is None and whole is None:
            found = (self._shard(each) for _, each in tensors_in(inputs, torch.Tensor)
                     if each.shape == tensor.shape)  # fmt: skip
            shard = next((each for each in found if each is not None), None)
        if shard is None:
            return None, {"placements": UNKNOWN, "mesh": self.mesh, "batch": self._batch}
        self._known[id(tensor)] = KnownLayout(weakref.ref(tensor), shard)
        placements = " ".join(shard.placements)
        return shard, {"placements": placements, "mesh": self.mesh, "batch": self._batch}

    def _shard(self, tensor: torch.Tensor) -> Shard | None:
        known = self._known.get(id(tensor))
        return known.shard if known is not None and known.tensor() is tensor else None


class TensorMesh(NamedTuple):
    """The ranks over which the layers of a model are split; all of them have the same batch."""

    shape: str = ""
    batch: str = ""  # the first of these ranks; other ranks have other batches


def tensor_mesh(root: torch.nn.Module) -> TensorMesh:
    """Return the mesh of a tensor-parallel model; an empty one for any other model."""
    parameters = [each for each in root.parameters() if hasattr(each, "device_mesh")]
    if not parameters:
        return TensorMesh()
    widest: Any = max(parameters, key=lambda each: each.device_mesh.ndim)
    mesh = widest.device_mesh
    ranks, coordinate = mesh.mesh, mesh.get_coordinate()
    if coordinate is None:  # this rank does not belong to it
        return TensorMesh()
    if any(base.__name__ == "FSDPModule" for m in root.modules() for base in type(m).__bases__):
        # parameters are first split over the ranks of FSDP, which have different batches
        placements = [each.placements for each in parameters if each.device_mesh.ndim == mesh.ndim]
        split = [all(hasattr(p[dim], "dim") for p in placements) for dim in range(mesh.ndim)]
        outer = split.index(True) + 1 if True in split else mesh.ndim
        if outer == mesh.ndim:
            return TensorMesh()
        ranks = ranks[tuple(coordinate[:outer])]
    return TensorMesh(str(tuple(ranks.shape)), str(int(ranks.min())))


def _inferred(whole: Any, local: torch.Tensor) -> Shard | None:
    """Return which part of a DTensor a layer handed on, by their shapes; None if unclear."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as Split

    placements = tuple(whole.placements)
    with torch.no_grad():
        same = whole.to_local().shape == local.shape
    if same and not any(placement.is_partial() for placement in placements):
        return shard_of(whole, placements)
    if whole.device_mesh.ndim > 1:
        return None
    if local.shape == whole.shape:
        return shard_of(whole, (Replicate(),))
    split = [d for d, (a, b) in enumerate(zip(local.shape, whole.shape, strict=False)) if a != b]
    return shard_of(whole, (Split(split[0]),)) if len(split) == 1 else None
