"""Statistics of tensors on a device, by operations of torch; see `track.packed`.

None of the operations waits for the device: the result is copied to the host as one small vector.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tensortap.core.record import Summary
from tensortap.rooms.track import packed
from tensortap.rooms.track.packed import PendingSummary
from tensortap.values.torch import private
from tensortap.values.torch.cuda import CudaPort, cuda
from tensortap.values.torch.tensors import dtype_name

_LONG = (torch.int64, torch.int32, torch.uint32, torch.uint64)  # float32 would round them
_CHUNK = 1 << 22  # elements whose exponents are counted at once: eight bytes of index each


def summarize_later(value: Any) -> PendingSummary | None:
    """Return the statistics of a tensor on a CUDA device; None for any other value."""
    if not isinstance(value, torch.Tensor):
        return None
    with private.without_overrides(), torch.no_grad():
        if not value.is_cuda or value.layout is not torch.strided:
            return None
        return reduce_later(torch.Tensor.as_subclass(value, torch.Tensor), cuda().port)


def reduce_later(tensor: torch.Tensor, port: CudaPort) -> PendingSummary:
    """Reduce a tensor on its device, and copy the result without waiting."""
    dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    with torch.no_grad():
        vector = reduce(tensor.detach())
        host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=tensor.is_cuda)
        event = port.copy(vector, host)

    def resolve() -> Summary | None:
        event.synchronize()
        return packed.unpack(host.numpy(), dtype, shape)

    return PendingSummary(event.query, resolve)


def reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Return the packed vector of a tensor, on its device, as int32.

    >>> vector = reduce(torch.tensor([1.0, -3.0]))
    >>> packed.unpack(vector.numpy(), "float32", (2,)).max_abs
    3.0
    """
    dtype = dtype_name(tensor.dtype)
    layout = packed.layout(dtype)
    x = _real(tensor)
    if not x.numel():
        empty = torch.zeros(layout.words, dtype=torch.int32, device=tensor.device)
        empty[0] = packed.WIDE
        return empty
    finite = torch.isfinite(x)
    nans, posinfs = torch.isnan(x).sum(), (x == torch.inf).sum()
    neginfs = (x == -torch.inf).sum()
    n = finite.sum()
    some = n.clamp(min=1).double()
    clean = torch.where(finite, x, 0)
    low = torch.where(finite, x, torch.inf).amin()
    high = torch.where(finite, x, -torch.inf).amax()
    size = clean.abs()
    min_abs = torch.where(finite, size, torch.inf).amin()
    unit = torch.frexp(size.amax().double())[1]
    # scaled to at most one: no eighth power leaves the range, and scaling is exact
    half = unit // 2  # in two steps: torch computes 2**unit itself, which could overflow
    y = torch.ldexp(torch.ldexp(clean, -half), half - unit)
    mean = y.sum(dtype=torch.float64) / some
    centered = torch.where(finite, y.double() - mean, 0.0)
    rest = centered.sum() / some
    variance = (centered * centered).sum() / some - rest * rest
    y = y.abs()
    mean_abs = y.sum(dtype=torch.float64) / some
    means = []
    for _ in range(3):
        y = y * y
        means.append(y.sum(dtype=torch.float64) / some)
    counts = _exponents(tensor, x, layout)
    zeros = n - counts.sum()
    figures = torch.stack([low.double(), high.double(), min_abs.double(), mean + rest, variance,
                           mean_abs, *means])  # fmt: skip
    wide = torch.full_like(n, packed.WIDE)
    head = torch.stack([wide, unit.long(), zeros, nans, posinfs, neginfs])
    words = [head.to(torch.int32), figures.view(torch.int32), counts.to(torch.int32)]
    return torch.cat(words)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values, flat, as float32 or float64; complex numbers as magnitudes."""
    x = tensor.reshape(-1)
    if x.is_complex():
        return x.abs()
    if x.dtype == torch.float64 or x.dtype in _LONG:
        return x.double()
    return x.float()


def _exponents(tensor: torch.Tensor, x: torch.Tensor, layout: packed.Layout) -> torch.Tensor:
    """Count the exponents of the values by their bits."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return _whole_exponents(tensor.reshape(-1), layout)
    wide = x.dtype == torch.float64
    mantissa, bias = (52, 1023) if wide else (23, 127)
    fields = (1 << (11 if wide else 8)) - 1
    counts = torch.zeros(layout.bins + 1, dtype=torch.int64, device=x.device)
    one = torch.ones(1, dtype=torch.int64, device=x.device)
    for chunk in x.split(_CHUNK):
        bits = chunk.view(torch.int64 if wide else torch.int32).long()
        field = (bits >> mantissa) & fields
        low = bits & ((1 << mantissa) - 1)
        # a subnormal is its mantissa in units of the smallest one
        small = torch.frexp(low.double())[1].long() - 1 + (1 - bias - mantissa)
        exponent = torch.where(field > 0, field - bias, small)
        nothing = (field == fields) | ((field == 0) & (low == 0))
        place = torch.where(nothing, layout.bins, exponent - layout.first)
        counts.index_add_(0, place, one.expand(place.shape))
    return counts[:-1]


def _whole_exponents(x: torch.Tensor, layout: packed.Layout) -> torch.Tensor:
    """Count the exponents of integers by comparison: a float would round the largest up."""
    # negative, because the smallest integer has no positive counterpart
    if x.dtype == torch.uint64:
        x = x.view(torch.int64)
        below = torch.where(x < 0, torch.iinfo(torch.int64).min, -x)
    else:
        below = -x.to(torch.int64).abs()
    reached = [(below <= -(1 << n)).sum() for n in range(layout.bins)]
    reached.append(torch.zeros_like(reached[0]))
    return torch.stack([a - b for a, b in itertools.pairwise(reached)])
