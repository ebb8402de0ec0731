"""Tensors as arrays in the memory of the host, for analyses; those of a GPU are copied."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import has_torch_function

from tensortap.values.torch.cuda import cuda
from tensortap.values.torch.tensors import view, why_not

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
