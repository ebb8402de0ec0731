"""Find which part of the whole each tensor of a tensor-parallel model is.

A parallel layer computes a DTensor and hands on its local tensor, so the layout is known only
before its own output hook has run. Modules that follow keep the layout of their input if they keep
its shape. Every other value has the placement ``"?"``: compare must not take it for a whole.
"""

from __future__ import annotations

import functools
import re
import weakref
from typing import Any, NamedTuple

import torch

from tensortap.core.record import Shard
from tensortap.rooms.track.observing import tensors_in
from tensortap.rooms.track.torch.internals import root_mesh
from tensortap.values.torch.shards import local_shard, shard_of

UNKNOWN = "?"
# dimensions whose ranks have different batches or parts of them, by the names that people give them
_OWN_BATCH = re.compile(
    r".*dp|data|batch|replicate|shard|ep|experts?|cp|context|pp|pipe(line)?|stages?"
)


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
        self, name: str, module: torch.nn.Module, tensor: torch.Tensor, inputs: Any
    ) -> tuple[Shard | None, dict[str, str]]:
        """Return which part an output of a module is, if that is known, and its tags."""
        if not self.mesh or hasattr(tensor, "device_mesh"):
            return None, {}
        whole = self._computed.pop(name, None)
        shard = self._shard(tensor) if whole is None else _inferred(whole, tensor)
        if shard is None and whole is None:
            found = (self._shard(each) for _, each in tensors_in(inputs, torch.Tensor)
                     if each.shape == tensor.shape)  # fmt: skip
            shard = next((each for each in found if each is not None), _of_columns(module, tensor))
        if shard is not None:
            self._known[id(tensor)] = KnownLayout(weakref.ref(tensor), shard)
        return self._placed(shard)

    def of_input(self, tensor: torch.Tensor) -> tuple[Shard | None, dict[str, str]]:
        """Return which part a tensor is that a module is called with, and its tags."""
        if not self.mesh or hasattr(tensor, "device_mesh"):
            return None, {}
        return self._placed(self._shard(tensor))

    def _placed(self, shard: Shard | None) -> tuple[Shard | None, dict[str, str]]:
        placements = UNKNOWN if shard is None else " ".join(shard.placements)
        return shard, {"placements": placements, "mesh": self.mesh, "batch": self._batch}

    def _shard(self, tensor: torch.Tensor) -> Shard | None:
        known = self._known.get(id(tensor))
        return known.shard if known is not None and known.tensor() is tensor else None


def _of_columns(module: torch.nn.Module, output: torch.Tensor) -> Shard | None:
    """Return which columns of its output a layer computed from a local weight; None if unclear.

    Libraries that unwrap the weight themselves hand on no DTensor.
    """
    weight: Any = module._parameters.get("weight")  # a parametrization is not run
    if not isinstance(module, torch.nn.Linear) or not hasattr(weight, "device_mesh"):
        return None
    rows = shard_of(weight, tuple(weight.placements))
    with torch.no_grad():
        here = weight.to_local().shape
    columns, size = weight.shape[0], output.ndim - 1
    if here[1] != weight.shape[1] or here[0] == columns or output.shape[-1] != here[0]:
        return None
    placements = tuple(each.replace("S(0)", f"S({size})") for each in rows.placements)
    return Shard((*output.shape[:-1], columns), (0,) * size + rows.offsets[:1], placements)


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


# -- device meshes: where this rank is, and which ranks share a batch -----------------------


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


def local_part(tensor: Any) -> Any:
    """Return the part of a DTensor on this rank; any other tensor as it is."""
    if type(tensor) is not torch.Tensor and hasattr(tensor, "to_local"):
        return local_shard(tensor)[0]
    return tensor


def like(tensor: Any, value: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
    """Return the value with the dtype, the device and the layout of a tensor."""
    value = value.to(tensor.device, dtype or tensor.dtype)
    if hasattr(tensor, "device_mesh"):
        from torch.distributed.tensor import DTensor

        # with the shape of the whole: torch would assume that all ranks have equal parts
        return DTensor.from_local(
            value, tensor.device_mesh, tensor.placements, run_check=False,
            shape=tensor.shape, stride=tensor.stride(),
        )  # fmt: skip
    return value
