"""Torch tensors as hooks report them: descriptions, and of a DTensor this rank's part."""

from __future__ import annotations

from typing import Any

import torch

from tensortap.core.errors import CaptureError
from tensortap.core.record import Kind, Shard
from tensortap.rooms.track.observing import Observed
from tensortap.rooms.track.torch.layouts import first_rank, mesh_tag
from tensortap.values.torch.shards import local_shard, waited
from tensortap.values.torch.tensors import dtype_name, why_not

_NO_TAGS: dict[str, str] = {}
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


class Descriptions:
    """Descriptions of tensors, kept while a name has the same dtype, shape and tags.

    With `detaching`, tensors are detached: whoever gets them may compute with them.
    """

    def __init__(self, detaching: bool = True) -> None:
        self._known: dict[tuple[str, Kind, int], Observed] = {}
        self._detaching = detaching

    def of(
        self,
        name: str,
        kind: Kind,
        tensor: torch.Tensor,
        call: int = 0,
        type_name: str = "",
        tags: dict[str, str] = _NO_TAGS,
        shard: Shard | None = None,
    ) -> Observed:
        """Return the description of a plain tensor: that of the last time if it is the same."""
        known = self._known.get((name, kind, call))
        if (
            known is not None
            and known.shape == tensor.shape
            and known.dtype == dtype_name(tensor.dtype)
            and known.tags == tags
            and known.shard == shard
            and known.type == type_name
        ):
            return known
        dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
        found = Observed(name, kind, call, type_name, dtype, shape, shard, tags)
        if len(self._known) >= 1 << 16:  # calls within `generate` have no end
            self._known.clear()
        self._known[name, kind, call] = found
        return found

    def observed(
        self, name: str, kind: Kind, tensor: torch.Tensor, *described: Any
    ) -> tuple[Observed, torch.Tensor]:
        """Return what the function `observed` does, with the description of the last time."""
        if type(tensor) not in _PLAIN or tensor.is_nested:
            return observed(name, kind, tensor, *described)
        known = self.of(name, kind, tensor, *described)
        return known, tensor.detach() if self._detaching else tensor


def observed(
    name: str,
    kind: Kind,
    tensor: torch.Tensor,
    call: int = 0,
    type_name: str = "",
    tags: dict[str, str] | None = None,
    shard: Shard | None = None,
) -> tuple[Observed, torch.Tensor]:
    """Return the description of a tensor, and the local, detached tensor itself.

    `shard` is the part that it is, unless it is a DTensor, which knows that itself.

    >>> description, local = observed("fc", Kind.WEIGHT, torch.ones(2, 3, requires_grad=True))
    >>> description.dtype, description.shape, local.requires_grad
    ('float32', (2, 3), False)
    """
    if tensor.is_nested:  # before its shape is asked for
        raise CaptureError(why_not(tensor))
    local: Any = tensor.detach()
    tags = tags or {}
    if type(local) is not torch.Tensor:
        local = waited(local)
    if type(local) is not torch.Tensor and hasattr(local, "to_local"):
        mesh = local.device_mesh
        local, shard = local_shard(local)
        tags = {**tags, "placements": " ".join(shard.placements), "mesh": mesh_tag(mesh)}
        if kind in (Kind.ACTIVATION, Kind.GRADIENT):
            tags["batch"] = first_rank(mesh)
    dtype, shape = dtype_name(local.dtype), tuple(local.shape)
    return Observed(name, kind, call, type_name, dtype, shape, shard, tags), local
