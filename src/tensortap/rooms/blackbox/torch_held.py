"""Copies of tensors in the memory of the host, inside the containers that held them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from tensortap.rooms.track.observing import tensors_in

# arguments that a step works with, not on: a copy of a model would be trained in its place
_SHARED = (
    torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler,
    torch.utils.data.DataLoader, torch.Generator,
)  # fmt: skip


class HeldTensor(NamedTuple):
    """A copy of a tensor and where it was; `holder` is the tensor itself, to write back into it.

    Of a distributed tensor it is this rank's part.
    """

    copy: torch.Tensor
    device: torch.device
    holder: torch.Tensor | None = None
    distributed: bool = False
    requires_grad: bool = False


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a distributed tensor that this rank has, in the same memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


Spare = dict[tuple[Any, ...], list[torch.Tensor]]


def spare_tensors(value: Any) -> Spare:
    """Return the copies in a value that nobody needs any more, for `hold` to fill again."""
    found: Spare = {}
    for _, held in tensors_in(value, HeldTensor):
        if held.copy.layout is torch.strided:
            found.setdefault(_form(held.copy), []).append(held.copy)
    return found


def hold(value: Any, holders: bool = False, spare: Spare | None = None) -> Any:
    """Return a copy of a value with a `HeldTensor` in place of each tensor."""

    def take(tensor: Any) -> HeldTensor:
        content = local(tensor).detach()
        known = spare.get(_form(content)) if spare and content.layout is torch.strided else None
        # memory that was written before takes a fourth of the time
        copied = known.pop().copy_(content) if known else content.to("cpu", copy=True)
        holder = tensor if holders else None
        is_distributed = hasattr(tensor, "to_local")
        return HeldTensor(copied, tensor.device, holder, is_distributed, tensor.requires_grad)

    return map_tensors(value, torch.Tensor, take)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def released(value: Any) -> Any:
    """Return fresh copies of what is held, on the devices where it was."""

    def take(held: HeldTensor) -> torch.Tensor:
        tensor = held.copy.to(held.device, copy=True)
        return tensor.requires_grad_() if held.requires_grad else tensor

    return map_tensors(value, HeldTensor, take)


def held_nbytes(value: Any) -> int:
    """Return the bytes of tensors that a value holds."""
    return sum(held.copy.nbytes for _, held in tensors_in(value, HeldTensor))


def map_tensors(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Return copies of dicts, lists and tuples around what `function` makes of each tensor."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        copied = copy.copy(value)  # a defaultdict has more than its items
        copied.update((key, map_tensors(item, kind, function)) for key, item in value.items())
        return copied
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, kind, function) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, kind, function) for item in value)
    return _copied(value)


def _copied(value: Any) -> Any:
    """Return a copy of a value without tensors; the program's own objects as they are."""
    if isinstance(value, _SHARED):
        return value
    if isinstance(value, Iterator):
        raise TypeError(
            f"a {type(value).__name__} cannot be read twice: pass the batch itself to the step"
        )
    return copy.deepcopy(value)
