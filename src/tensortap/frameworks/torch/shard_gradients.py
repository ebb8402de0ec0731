"""Gradients of this rank in a model of `fully_shard`, before ranks average them.

While a sharded module runs, its attributes are whole parameters: leaves of the graph that FSDP
keeps for all steps. Hooks on them see what this rank adds to the average. Of that, they report the
part that is this rank's shard: the average is known there and nowhere else.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from tensortap.frameworks.torch import private
from tensortap.frameworks.torch.hidden import hide_from_compiler
from tensortap.frameworks.torch.meshes import is_sharded_module, sharded_dimensions
from tensortap.frameworks.torch.shards import local_shard
from tensortap.frameworks.torch.tensors import quiet


class _OwnShard(NamedTuple):
    """Location of a parameter in the model, and the part of it that this rank has."""

    name: str
    owner: torch.nn.Module
    attribute: str
    part: tuple[slice, ...]
    sharded: torch.nn.Module  # to which FSDP belongs


class ShardGradients:
    """Hooks on the whole parameters of a sharded model.

    `take` gets a name, this rank's gradient of its own shard, and the factor by which the average
    contains it.
    """

    def __init__(
        self,
        root: torch.nn.Module,
        named: Mapping[str, torch.nn.Parameter],
        take: Callable[[str, torch.Tensor, float], None],
        guarded: Callable[..., None],
    ) -> None:
        self._take, self._guarded = take, guarded
        self._undo: list[Callable[[], object]] = []
        self._hooked: dict[str, weakref.ref[torch.Tensor]] = {}
        names = {id(each): name for name, each in named.items() if _is_shard(each)}
        sizes = {name: named[name].device_mesh.size() for name in names.values()}
        self.ranks = max(sizes.values(), default=1)
        self._shards: dict[torch.nn.Module, list[_OwnShard]] = {}
        for owner, sharded in _owners(root).items():
            for attribute, parameter in owner.named_parameters(recurse=False):
                name = names.get(id(parameter), "")
                if sizes.get(name) == self.ranks:
                    own = _OwnShard(name, owner, attribute, _part(parameter), sharded)
                    self._shards.setdefault(sharded, []).append(own)

    def attach(self) -> None:
        for module in self._shards:
            look = functools.partial(self._guarded, self._before_forward)
            hide_from_compiler(look)
            # behind FSDP's own hook, which is always the first one
            self._undo.append(module.register_forward_pre_hook(look).remove)

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._hooked.clear()

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        for own in self._shards[module]:
            parameter = getattr(own.owner, own.attribute)
            hooked = self._hooked.get(own.name, lambda: None)()
            if parameter is hooked or _is_shard(parameter) or not parameter.requires_grad:
                continue
            look = functools.partial(self._guarded, self._on_gradient, own)
            hide_from_compiler(look)
            self._hooked[own.name] = weakref.ref(parameter)
            self._undo.append(parameter.register_hook(look).remove)

    def _on_gradient(self, own: _OwnShard, gradient: torch.Tensor) -> None:
        divisor = private.gradient_divisor(own.sharded)
        with quiet():
            part = gradient.detach()[own.part]
        self._take(own.name, part, 1.0 if divisor is None else self.ranks / divisor)


def _owners(root: torch.nn.Module) -> dict[torch.nn.Module, torch.nn.Module]:
    """Return the innermost sharded module that contains each module."""
    sharded = [module for module in root.modules() if is_sharded_module(module)]
    return {module: outer for outer in sharded for module in outer.modules()}


def _is_shard(parameter: Any) -> bool:
    """Return whether FSDP alone splits a parameter, not tensor parallelism as well."""
    if not hasattr(parameter, "device_mesh"):
        return False
    last = parameter.placements[-1]
    ndim = parameter.device_mesh.ndim
    return hasattr(last, "dim") and sharded_dimensions([parameter.placements], ndim) == ndim


def _part(parameter: torch.nn.Parameter) -> tuple[slice, ...]:
    local, shard = local_shard(parameter)
    pairs = zip(shard.offsets, local.shape, strict=True)
    return tuple(slice(start, start + size) for start, size in pairs)
