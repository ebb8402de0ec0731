"""Statistics of torch tensors: read in place on the CPU, copied from other devices."""

from __future__ import annotations

import contextlib
import ctypes
import os

import torch
from torch.overrides import has_torch_function

from tensortap.core.record import Summary, TensorData
from tensortap.stats import summarize as stats
from tensortap.stats.columns import Memory
from tensortap.values.torch import private
from tensortap.values.torch.tensors import KNOWN, snapshot_plain
from tensortap.values.view import as_numpy


def summarize(value: torch.Tensor, *, threads: int = stats.AUTO) -> Summary:
    """Return the statistics of a tensor.

    >>> summarize(torch.tensor([1.0, -3.0])).max_abs
    3.0
    """
    if has_torch_function((value,)):
        with private.without_overrides(), torch.no_grad():
            return _summarize(torch.Tensor.as_subclass(value, torch.Tensor), threads)
    return _summarize(value, threads)


def _summarize(value: torch.Tensor, threads: int) -> Summary:
    memory = _memory(value)
    if memory is not None:
        found: Summary | None = stats.kernel.summarize(*memory, threads)
        if found is not None:
            return found
    node, _ = snapshot_plain(value, None)
    assert isinstance(node, TensorData)
    return stats.summarize_array(as_numpy(node), threads=threads)


def memory_of(value: torch.Tensor) -> Memory | None:
    """Return where the kernel finds the elements; None for tensors that need the general way."""
    if has_torch_function((value,)):
        return None
    memory = _memory(value)
    # complex128: magnitudes may be beyond float64
    return None if memory is None or memory[1] == _COMPLEX128 else memory


def _memory(value: torch.Tensor) -> Memory | None:
    memory: Memory | None = _locate(value, _codes)
    if memory is None and value.dtype not in _codes and _learn(value.dtype):
        memory = _locate(value, _codes)
    return memory


def _learn(dtype: torch.dtype) -> bool:
    """Look up a dtype when it is first seen: those of 8 bits take a while."""
    name, itemsize, lazy = KNOWN.get(dtype, ("", 0, 0))
    code = stats.code_of(name)
    if code is not None:
        _codes[dtype] = code, itemsize, lazy
    return code is not None


_codes: dict[torch.dtype, tuple[int, int, int]] = {}  # code, size and lazy views: see `KNOWN`


def _nowhere(value: torch.Tensor, codes: object) -> None:
    return None


_locate = _nowhere if stats.kernel is None else stats.kernel.locate
_COMPLEX128 = getattr(stats.kernel, "COMPLEX128", None)


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


def _use_exchange() -> bool:
    """Let the kernel find the elements of tensors itself, where torch has DLPack's exchange."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if stats.kernel is None or capsule is None:
        return False
    classes = torch.Tensor, torch.nn.Parameter
    return bool(stats.kernel.use_exchange(classes, capsule, has_torch_function))


EXCHANGES = _use_exchange()
"""Whether the kernel finds the elements of tensors itself."""
