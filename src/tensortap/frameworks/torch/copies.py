"""Copies of torch tensors: on their device, out of every graph."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from xxhash import xxh3_128_digest

from tensortap.errors import CaptureError
from tensortap.frameworks.protocol import SMALL, borrow, read
from tensortap.frameworks.torch.adapter import is_lazy, quiet, why_not

_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transformed = torch._C._functorch.is_functorch_wrapped_tensor
_LARGE = 1 << 20  # bytes


class Small(NamedTuple):
    """A small tensor as its bytes, which are equal if it is: taken with little of torch."""

    dtype: torch.dtype
    shape: torch.Size
    data: bytes

    def tensor(self) -> torch.Tensor:
        """The tensor."""
        with quiet(), torch.inference_mode(False):
            flat = torch.frombuffer(bytearray(self.data), dtype=torch.uint8)
            return flat.view(self.dtype).view(self.shape)


def marked_copy(value: torch.Tensor) -> tuple[Hashable, Any] | None:
    """What tells whether a tensor has changed, and a copy of it; both in a few steps.

    None for what has to be looked at more closely, and for large tensors: those that have not
    changed are not to be copied.

    >>> marked_copy(torch.ones(2))[0].data.hex()
    '0000803f0000803f'
    """
    if _function_modes() or _dispatch_modes():  # even reading an attribute would run a mode
        return None
    try:
        nbytes, dtype = value.nbytes, value.dtype
        if not 0 < nbytes <= _LARGE or not value.is_cpu or is_lazy(value, dtype):
            return None
        if nbytes <= SMALL:
            if not value.is_contiguous():
                value = value.detach().contiguous()
            small = Small(dtype, value.shape, read(value.data_ptr(), nbytes))
            return small, small
        if not value.is_contiguous() or torch.is_inference_mode_enabled():
            return None
        value = value.detach().clone()  # no graph records it: what it is made of is detached
        digest = xxh3_128_digest(borrow(value.data_ptr(), nbytes))
        # as `kept.fingerprint` has it: the next one may be looked at more closely
        return (torch.Tensor, str(dtype)[6:], tuple(value.shape), digest), value
    except (RuntimeError, KeyError):
        return None  # it has no bytes of its own, or a dtype of its own: it is copied, or refused


def copied_tensor(value: torch.Tensor) -> torch.Tensor:
    """A copy that belongs to nobody else.

    >>> x = torch.ones(2, requires_grad=True) * 2
    >>> copied_tensor(x).requires_grad
    False
    """
    plain = type(value) is torch.Tensor and not (_function_modes() or _dispatch_modes())
    if plain and not torch.is_inference_mode_enabled():
        return _detached(value)  # no graph records it: what it is made of is detached
    with quiet(), torch.inference_mode(False):
        return _detached(value)


def _detached(value: torch.Tensor) -> torch.Tensor:
    if _transformed(value) or value.is_meta:
        raise CaptureError(why_not(value))
    return value.detach().clone()
