"""Copies of torch tensors: on their device, out of every graph."""

from __future__ import annotations

import torch

from tensortap.arrays.torch import quiet, why_not
from tensortap.errors import CaptureError

_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transformed = torch._C._functorch.is_functorch_wrapped_tensor


def copied_tensor(value: torch.Tensor) -> torch.Tensor:
    """A copy that belongs to nobody else.

    >>> x = torch.ones(2, requires_grad=True) * 2
    >>> copied_tensor(x).requires_grad
    False
    """
    if _transformed(value) or value.is_meta:
        raise CaptureError(why_not(value))
    plain = type(value) is torch.Tensor and not (_function_modes() or _dispatch_modes())
    if plain and not torch.is_inference_mode_enabled():
        return value.detach().clone()  # no graph records it: what it is made of is detached
    with quiet(), torch.inference_mode(False):
        return value.detach().clone()
