"""Read tensors without a change to them: in the memory of the host, or copied from a device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.overrides import has_torch_function

from tensortap.stats.summarize import kernel
from tensortap.values.torch.cuda import cuda
from tensortap.values.torch.tensors import quiet, view, why_not

MOST_COPIED = 4 << 30
"""Bytes of parameters and gradients that are copied from a device at once."""


def is_here(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in the memory of the host."""
    return bool(tensor.is_cpu)


def is_readable(tensor: torch.Tensor) -> bool:
    """Return whether the values of a tensor can be read now: not while a CUDA graph is captured."""
    if has_torch_function((tensor,)) or why_not(tensor):
        return False
    return is_here(tensor) or not (tensor.is_cuda and cuda().port.capturing())


def host_view(tensor: torch.Tensor) -> Any:
    """Return a tensor as a NumPy array; None where that is impossible.

    It is the tensor's own memory, or else a copy, which waits for the device.

    >>> host_view(torch.ones(2)).tolist(), host_view(torch.ones(2, device="meta"))
    ([1.0, 1.0], None)
    """
    if is_here(tensor):
        return view(tensor)
    return view(tensor.detach().cpu()) if is_readable(tensor) else None


def is_plain(tensor: object) -> bool:
    """Return whether the values of a tensor are plain memory of the CPU, for which nobody waits."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    assert isinstance(tensor, torch.Tensor)
    return tensor.is_cpu and tensor.numel() > 0 and not why_not(tensor)


def sum_of_squares(tensors: list[torch.Tensor]) -> float | None:
    """Return the sum of all squares, finite if all values are; None if some are not on the CPU.

    >>> sum_of_squares([torch.ones(3), torch.full((2, 2), 2.0)])
    19.0
    """
    found: float | None = kernel and kernel.sum_of_squares(tensors)
    if found is None and all(map(is_plain, tensors)):  # other dtypes, or strides
        with quiet():
            found = math.fsum(float(each.detach().double().square().sum()) for each in tensors)
    return found


def sample(tensor: torch.Tensor, most: int = 1024) -> torch.Tensor:
    """Return a copy of up to `most` values that are spread over a tensor.

    >>> sample(torch.arange(10), 3).tolist()
    [0, 5]
    """
    flat = tensor.detach().reshape(-1)
    # odd, so that not all values of a matrix are from the same column
    return flat[:: -(-len(flat) // most) | 1].clone()
