"""Private copies of torch tensors: on their device, outside of every graph."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch.overrides import has_torch_function
from xxhash import xxh3_128_digest

from tensortap.errors import CaptureError
from tensortap.frameworks.memory import borrow, read
from tensortap.frameworks.protocol import SMALL
from tensortap.frameworks.torch import private
from tensortap.frameworks.torch.tensors import dtype_name, is_lazy, quiet, why_not

_LARGE = 1 << 20  # bytes


class CompactTensor(NamedTuple):
    """A small tensor as its bytes, which are equal if the tensors are."""

    dtype: torch.dtype
    shape: torch.Size
    data: bytes

    def tensor(self) -> torch.Tensor:
        """Return the tensor."""
        with quiet(), torch.inference_mode(False):
            flat = torch.frombuffer(bytearray(self.data), dtype=torch.uint8)
            return flat.view(self.dtype).view(self.shape)


def keyed_copy(value: torch.Tensor) -> tuple[Hashable, Any] | None:
    """Return a key that tells whether a tensor has changed, and a copy of it.

    None for tensors that need a closer look, and for large ones: those are copied only if they
    have changed.

    >>> keyed_copy(torch.ones(2))[0].data.hex()
    '0000803f0000803f'
    """
    # even reading an attribute would run a mode
    if has_torch_function((value,)) or private.has_dispatch_modes():
        return None
    try:
        nbytes, dtype = value.nbytes, value.dtype
        if not 0 < nbytes <= _LARGE or not value.is_cpu or is_lazy(value, dtype):
            return None
        if nbytes <= SMALL:
            if not value.is_contiguous():
                value = value.detach().contiguous()
            compact = CompactTensor(dtype, value.shape, read(value.data_ptr(), nbytes))
            return compact, compact
        if not value.is_contiguous() or torch.is_inference_mode_enabled():
            return None
        value = value.detach().clone()  # detached, so no graph records the clone
        digest = xxh3_128_digest(borrow(value.data_ptr(), nbytes))
        # the same key as the general way to tell changes makes
        return (torch.Tensor, dtype_name(dtype), tuple(value.shape), digest), value
    except (RuntimeError, KeyError):
        return None  # no memory of its own, or an unknown dtype


def copied_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return a detached copy on the same device.

    >>> x = torch.ones(2, requires_grad=True) * 2
    >>> copied_tensor(x).requires_grad
    False
    """
    plain = type(value) is torch.Tensor and not (
        has_torch_function((value,)) or private.has_dispatch_modes()
    )
    if plain and not torch.is_inference_mode_enabled():
        return _detached(value)  # detached, so no graph records the clone
    with quiet(), torch.inference_mode(False):
        return _detached(value)


def _detached(value: torch.Tensor) -> torch.Tensor:
    if value.is_meta or not (value.is_nested or _has_memory(value)):
        raise CaptureError(why_not(value))
    return value.detach().clone()


def _has_memory(value: torch.Tensor) -> bool:
    """Return whether a tensor is real: inside torch.func a clone would escape its transform."""
    if value.layout is not torch.strided:
        return True
    try:
        value.data_ptr()
    except RuntimeError:
        return False
    return True
