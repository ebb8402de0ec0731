"""The digest of a tensor on a device, by operations of torch; see `track.shard_digest`.

None of the operations waits for the device: the sums are copied to the host as four numbers.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch

from tensortap.core.record import Shard
from tensortap.rooms.track.digests import PendingDigest
from tensortap.rooms.track.shard_digest import BLOCK, key_table, mix_bits, seed_of
from tensortap.stats.shard_digest import packed
from tensortap.values.torch import private
from tensortap.values.torch.cuda import CudaPort, cuda
from tensortap.values.torch.tensors import dtype_name

_CHUNK = 1 << 19  # elements at once: some hundred bytes of temporary numbers each


def digest_later(value: Any, shard: Shard | None) -> PendingDigest | None:
    """Return the digest of a tensor on a device; None for any other value."""
    if not isinstance(value, torch.Tensor) or value.is_cpu or value.is_meta or value.is_nested:
        return None
    if value.layout is not torch.strided:
        return None
    with private.without_overrides(), torch.no_grad():
        return start_digest(torch.Tensor.as_subclass(value.detach(), torch.Tensor), shard)


def start_digest(
    tensor: torch.Tensor, shard: Shard | None = None, port: CudaPort | None = None
) -> PendingDigest:
    """Compute a digest on the device of a tensor, and copy the sums without waiting."""
    whole = tuple(tensor.shape) if shard is None else shard.global_shape
    seed = seed_of(dtype_name(tensor.dtype), whole)
    with torch.no_grad():
        sums = digest_sums(tensor.detach(), shard)
        if not tensor.is_cuda and port is None:  # a device without a side stream
            host, event = sums.cpu(), None
        else:
            host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=tensor.is_cuda)
            event = (port or cuda().port).copy(sums, host)

    def resolve() -> bytes:
        if event is not None:
            event.synchronize()
        return packed(seed, *host.tolist())

    return PendingDigest((lambda: True) if event is None else event.query, resolve)


def digest_sums(tensor: torch.Tensor, shard: Shard | None = None) -> torch.Tensor:
    """Return the four sums of a digest, on the device of the tensor.

    >>> from tensortap.rooms.track.shard_digest import shard_digest
    >>> x = torch.arange(5.0)
    >>> packed(seed_of("float32", (5,)), *digest_sums(x).tolist()) == shard_digest(x.numpy())
    True
    """
    whole, offsets = tuple(tensor.shape), (0,) * tensor.ndim
    if shard is not None:
        whole, offsets = shard.global_shape, shard.offsets
    shape = (1,) * (len(whole) - tensor.ndim) + tuple(tensor.shape)  # one of a stack
    seed, itemsize = seed_of(dtype_name(tensor.dtype), whole), tensor.element_size()
    device = tensor.device
    sums = torch.zeros(4, dtype=torch.int64, device=device)
    if not tensor.numel():
        return sums
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = flat.resolve_neg().contiguous().reshape(-1)
    pieces = flat.view(torch.uint8 if itemsize == 1 else torch.int16).reshape(tensor.numel(), -1)
    per_block = BLOCK // itemsize
    keys = _keys(device)
    matrices = _matrices(seed, math.prod(whole) // per_block + 1, device)
    for start in range(0, tensor.numel(), _CHUNK):
        count = min(_CHUNK, tensor.numel() - start)
        numbers = _numbers(start, count, shape, whole, offsets, device)
        place, block = numbers[:, None] % per_block, numbers // per_block
        value = pieces[start : start + count].int()
        if itemsize == 1:  # half of a piece, which has a sign
            value = ((value << place % 2 * 8) ^ 0x8000) - 0x8000
            place = place // 2
        else:
            place = place * (itemsize // 2) + torch.arange(itemsize // 2, device=device)
        inner = (value[:, :, None] * keys[place]).sum(1, dtype=torch.int32)
        for row in range(4):
            sums[row] += (inner * matrices[block, row]).sum()
    return sums


@functools.cache
def _keys(device: torch.device) -> torch.Tensor:
    return torch.tensor(key_table(), device=device)


def _matrices(seed: int, blocks: int, device: torch.device) -> torch.Tensor:
    """Return `block_matrices`, computed on the device: a copy from the host might wait for it."""
    start = _signed(int(mix_bits(np.array([seed], np.uint64))[0]))
    step = _signed(0x9E3779B97F4A7C15)
    found = _mix(start + (torch.arange(8 * blocks, device=device) + 1) * step)
    return torch.stack([found, found >> 32], dim=1).int().reshape(blocks, 4, 4)


def _mix(z: torch.Tensor) -> torch.Tensor:
    """Mix the bits of 64-bit numbers, as kernel/digest.c does."""
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right as unsigned numbers."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _numbers(
    start: int, count: int, shape: tuple[int, ...], whole: Any, offsets: Any, device: torch.device
) -> torch.Tensor:
    """Return the positions in the whole tensor of some elements of a shard."""
    rest = torch.arange(start, start + count, device=device)
    numbers = torch.zeros_like(rest)
    for axis in range(len(shape) - 1, -1, -1):
        stride = math.prod(whole[axis + 1 :])
        numbers += (rest % shape[axis] + offsets[axis]) * stride
        rest = rest // shape[axis]
    return numbers
