"""Copies of tensors in the memory of the host, inside the containers that held them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class HeldTensor(NamedTuple):
    """A copy of a tensor and where it was; `holder` is the tensor itself, to write back into it.

    Of a distributed tensor it is this rank's part.
    """

    copy: torch.Tensor
    device: torch.device
    holder: torch.Tensor | None = None
    distributed: bool = False


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a distributed tensor that this rank has, in the same memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def hold(value: Any, holders: bool = False) -> Any:
    """Return a copy of a value with a `HeldTensor` in place of each tensor."""

    def take(tensor: Any) -> HeldTensor:
        content = local(tensor).detach().to("cpu", copy=True)
        holder = tensor if holders else None
        return HeldTensor(content, tensor.device, holder, hasattr(tensor, "to_local"))

    return map_tensors(value, torch.Tensor, take)


def released(value: Any) -> Any:
    """Return fresh copies of what is held, on the devices where it was."""
    return map_tensors(value, HeldTensor, lambda held: held.copy.to(held.device, copy=True))


def held_nbytes(value: Any) -> int:
    """Return the bytes of tensors that a value holds."""
    total = 0

    def count(held: HeldTensor) -> None:
        nonlocal total
        total += held.copy.nbytes

    map_tensors(value, HeldTensor, count)
    return total


def plain(value: Any) -> tuple[Any, list[tuple[str, list[int], bool]]]:
    """Return a value with plain tensors, and the layout of each.

    A layout is the device, the order of dimensions in memory, and whether it is distributed.
    """
    layouts: list[tuple[str, list[int], bool]] = []

    def take(held: HeldTensor) -> torch.Tensor:
        strides = held.copy.stride()
        order = sorted(range(len(strides)), key=lambda axis: -strides[axis])
        order = [] if held.copy.is_contiguous() else order
        layouts.append((str(held.device), order, held.distributed))
        return held.copy

    return map_tensors(value, HeldTensor, take), layouts


def held_from(value: Any, layouts: Any) -> Any:
    """Return what `plain` was made of; raise ValueError if it does not fit."""
    rest = iter(layouts)

    def take(tensor: torch.Tensor) -> HeldTensor:
        device, order, distributed = next(rest)
        if order:
            if sorted(order) != list(range(tensor.ndim)):
                raise ValueError("a tensor has no such dimensions")
            back = sorted(range(tensor.ndim), key=lambda axis: order[axis])
            tensor = tensor.permute(order).contiguous().permute(back)
        return HeldTensor(tensor, torch.device(device), distributed=bool(distributed))

    return map_tensors(value, torch.Tensor, take)


def map_tensors(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Return copies of dicts, lists and tuples around what `function` makes of each tensor."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return type(value)((key, map_tensors(item, kind, function)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, kind, function) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, kind, function) for item in value)
    return copy.deepcopy(value)
