"""Statistics of torch tensors: read in place on the CPU, reduced on CUDA devices."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

import torch
from torch.overrides import has_torch_function

from tensortap.frameworks.protocol import PendingSummary
from tensortap.frameworks.torch import private
from tensortap.frameworks.torch.tensors import KNOWN, is_lazy, snapshot_plain
from tensortap.frameworks.view import as_numpy
from tensortap.record import Summary, TensorData
from tensortap.stats import summarize as stats

# the kernel's code of each dtype (None: it has none), and the size of an element
_codes: dict[torch.dtype, tuple[int | None, int]] = {}


def summarize(value: torch.Tensor, *, threads: int = stats.AUTO) -> Summary | PendingSummary:
    """Return the statistics of a tensor; on CUDA they are pending.

    >>> summarize(torch.tensor([1.0, -3.0])).max_abs
    3.0
    """
    if has_torch_function((value,)):
        with private.without_overrides(), torch.no_grad():
            return _summarize(torch.Tensor.as_subclass(value, torch.Tensor), threads)
    return _summarize(value, threads)


def _summarize(value: torch.Tensor, threads: int) -> Summary | PendingSummary:
    if value.is_cuda:
        from tensortap.frameworks.torch.device_stats import reduce_later

        return reduce_later(value)
    if value.is_cpu:
        try:
            found = _summarize_in_place(value, threads)
            if found is not None:
                return found
        except (RuntimeError, KeyError):
            pass  # no storage, or an unknown dtype: the snapshot below reports it
    node, _ = snapshot_plain(value, None)
    assert isinstance(node, TensorData)
    return stats.summarize_array(as_numpy(node), threads=threads)


def _summarize_in_place(value: torch.Tensor, threads: int) -> Summary | None:
    dtype = value.dtype
    code, itemsize = _codes.get(dtype) or _learn(dtype)
    # a nested tensor looks dense apart from `is_nested`
    if code is None or is_lazy(value, dtype) or value.is_nested:
        return None
    count = value.numel()
    address = value.data_ptr()
    if count and not address:
        return None
    shape: Any = count
    strides = None
    if not value.is_contiguous():
        shape = tuple(value.shape)
        strides = tuple([itemsize * stride for stride in value.stride()])
    found: Summary | None = stats.kernel.summarize(address, code, shape, strides, threads)
    return found


def _learn(dtype: torch.dtype) -> tuple[int | None, int]:
    name, itemsize, _ = KNOWN[dtype]
    _codes[dtype] = stats.code_of(name), itemsize
    return _codes[dtype]


def _share_threads() -> None:
    """Let the kernel run on the OpenMP threads of torch, and on no more of them."""
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    found = [name for name in os.listdir(folder) if name.startswith(_OPENMP)]
    if stats.kernel is None or len(found) != 1:
        return
    library = ctypes.CDLL(os.path.join(folder, found[0]))  # it is loaded already
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_max_threads")
    calls = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names]
    stats.kernel.use_team(*calls)


_OPENMP = ("libgomp", "libiomp5", "libomp")
with contextlib.suppress(OSError, AttributeError):  # another build of torch: threads of our own
    _share_threads()
