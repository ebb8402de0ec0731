"""torch tensors: read where they lie, without any operation that torch could notice.

A contiguous tensor on the CPU is copied from its address; nothing is dispatched, so no graph,
no mode, no counter and no random state knows of it. Only what is strided, conjugated, negated
or on a device goes through operations of torch, with all modes off.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tensortap.buffers import Pool
from tensortap.dtypes import DTYPES, numpy_dtype
from tensortap.errors import CaptureError
from tensortap.frameworks.numpy.adapter import build as build_numpy
from tensortap.frameworks.numpy.adapter import payload
from tensortap.frameworks.protocol import SMALL, Adapter, Path, Taken, keep, refusing
from tensortap.frameworks.torch.shards import local_of
from tensortap.frameworks.view import as_numpy
from tensortap.record import Summary, TensorData
from tensortap.stats import summarize as stats

_DTYPES: dict[str, torch.dtype] = {
    row.name: getattr(torch, row.torch)
    for row in DTYPES.values()
    if row.torch and hasattr(torch, row.torch)  # older releases lack some
}

# the bits of conjugate and negative views are not the value's; only these dtypes have such views
_NEGATED = (torch.float16, torch.float32, torch.float64)

# dtype → name, size, and the lazy views of it: 1 negative, 2 negative or conjugate, 0 none
_KNOWN: dict[torch.dtype, tuple[str, int, int]] = {
    dtype: (name, dtype.itemsize, 2 if dtype.is_complex else int(dtype in _NEGATED))
    for name, dtype in _DTYPES.items()
}

# integers of the same size: they are copied bit by bit, and every dtype has them
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# the fastest way to a few bytes at an address
_SCALAR = {size: (ctypes.c_char * size).from_address for size in (1, 2, 4, 8, 16)}

_function_modes = torch._C._len_torch_function_stack


def is_lazy(value: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether its bytes are not its values: it is a negative or conjugate view of others."""
    lazy = _KNOWN[dtype][2]
    return bool(lazy and (value.is_neg() or (lazy == 2 and value.is_conj())))


def _take(value: torch.Tensor, pool: Pool | None, path: Path) -> Taken:
    # even reading an attribute would run a mode
    if _function_modes():
        with torch._C.DisableTorchFunction():
            return _take_plain(value, pool)
    return _take_plain(value, pool)


def _take_plain(value: torch.Tensor, pool: Pool | None) -> Taken:
    try:
        name, itemsize, lazy = _KNOWN[value.dtype]
        if value.is_cpu and not (lazy and is_lazy(value, value.dtype)):
            if not value.ndim:
                if address := value.data_ptr():
                    return TensorData("torch", name, (), _SCALAR[itemsize](address).raw), itemsize
            elif value.is_contiguous():
                shape = tuple(value.shape)
                if address := value.data_ptr():
                    nbytes = math.prod(shape) * itemsize
                    return TensorData("torch", name, shape, keep(address, nbytes, pool)), nbytes
    except (RuntimeError, KeyError):
        pass  # no storage, or no such dtype: said below
    return _take_any(value, pool)


def _take_subclass(value: torch.Tensor, pool: Pool | None, path: Path) -> Taken:
    # attributes of a subclass may run its own code
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return _take_plain(torch.Tensor.as_subclass(value, torch.Tensor), pool)


def _take_any(value: torch.Tensor, pool: Pool | None) -> Taken:
    reason = why_not(value)
    if reason:
        raise CaptureError(reason)
    name, itemsize, _ = _KNOWN[value.dtype]
    shape = tuple(value.shape)
    nbytes = math.prod(shape) * itemsize
    if not nbytes:
        return TensorData("torch", name, shape, b""), 0
    try:
        with quiet():
            return TensorData("torch", name, shape, _copied(value.detach(), nbytes, pool)), nbytes
    except RuntimeError as error:
        raise CaptureError(f"torch can't copy this tensor: {error}") from error


def _copied(value: torch.Tensor, nbytes: int, pool: Pool | None) -> Any:
    if value.is_cuda and pool is not None:
        from tensortap.frameworks.torch.cuda import cuda

        return cuda().send(value, nbytes, pool)
    if not value.is_cpu:
        value = value.cpu()
    if nbytes <= SMALL or pool is None:
        few = bytearray(nbytes)
        _copy(value, few)
        return bytes(few) if nbytes <= SMALL else memoryview(few)
    lease = pool.acquire(nbytes)
    _copy(value, lease.writable)
    return lease


def _copy(value: torch.Tensor, memory: Any) -> None:
    source = as_bits(value)
    target(source, memory).copy_(source)


def target(like: torch.Tensor, memory: Any) -> torch.Tensor:
    """A tensor in C order over `memory`, of the dtype and shape of another."""
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    return flat.view(like.dtype).view(like.shape)


def as_bits(value: torch.Tensor) -> torch.Tensor:
    """The tensor as integers of its size, which are copied bit by bit and for every dtype."""
    if value.is_conj() or value.is_neg() or value.element_size() not in _BITS:
        return value
    return value.view(_BITS[value.element_size()])


def quiet() -> contextlib.AbstractContextManager[Any]:
    """Operations of torch that no mode sees and no graph records."""
    if not (_function_modes() or torch._C._len_torch_dispatch_stack()):
        no_grad: contextlib.AbstractContextManager[Any] = torch.no_grad()
        return no_grad
    from torch.utils._python_dispatch import _disable_current_modes

    stack = contextlib.ExitStack()
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(_disable_current_modes())
    stack.enter_context(torch.no_grad())
    return stack


def in_place(value: torch.Tensor) -> Any:
    """The tensor's own memory as a NumPy array, strides and all; None where that can't be.

    >>> in_place(torch.ones(2, 3).T).strides
    (4, 12)
    """
    if _function_modes() or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if not value.is_cpu or why_not(value) or value.is_neg() or value.is_conj():
        return None
    name, itemsize, _ = _KNOWN[value.dtype]
    if name == "complex32":  # NumPy has it only as a pair
        return None
    if itemsize > 8:
        return value.detach().numpy()
    return as_bits(value.detach()).numpy().view(numpy_dtype(name))


def why_not(value: torch.Tensor) -> str:
    """Why a tensor can't be caught, and what to catch instead; empty when it can."""
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return (
            "inside torch.func (vmap, grad, jvp, functionalize) a tensor has no bytes of its own: "
            "return it from the function and catch the result"
        )
    if torch._is_functional_tensor(value):
        return (
            "a tensor being functionalized has no bytes: catch it outside the transformed function"
        )
    if value.is_nested:
        return "a nested tensor has no single shape: catch tensor.unbind(), or to_padded_tensor(0)"
    if value.layout is not torch.strided:
        return f"a tensor of layout {value.layout} is not dense: catch tensor.to_dense()"
    if value.is_quantized:
        return "a quantized tensor is numbers and a scale: catch tensor.dequantize(), or int_repr()"
    if value.is_meta:
        return "a meta tensor has a shape but no data: catch it after it is materialized"
    if value.dtype not in _KNOWN:
        return f"dtype {value.dtype} can't be caught: catch tensor.to(...) of a known one"
    if value.is_cpu and value.numel() and not value.data_ptr():
        return (
            "the storage of this tensor has been freed (resharded parameters are): "
            "catch it while it is gathered"
        )
    return ""


def _nbytes(value: torch.Tensor, path: Path) -> int:
    if _function_modes():
        with torch._C.DisableTorchFunction():
            return _nbytes_plain(value, path)
    return _nbytes_plain(value, path)


def _nbytes_plain(value: torch.Tensor, path: Path) -> int:
    try:
        return int(value.numel() * value.element_size())
    except RuntimeError:
        return 0  # nested: `take` says why


def _describe(value: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    if _function_modes():
        with torch._C.DisableTorchFunction():
            return _describe_plain(value)
    return _describe_plain(value)


def _describe_plain(value: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    dtype = value.dtype
    name = _KNOWN[dtype][0] if dtype in _KNOWN else str(dtype).removeprefix("torch.")
    try:
        return name, tuple(value.shape)
    except RuntimeError:
        return name, ()


def _subclass_nbytes(value: torch.Tensor, path: Path) -> int:
    with torch._C.DisableTorchFunction():
        return _nbytes_plain(value, path)


def _subclass_describe(value: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    with torch._C.DisableTorchFunction():
        return _describe_plain(value)


def _take_small(value: torch.Tensor) -> Taken | None:
    if _function_modes() or not value.is_cpu:
        return None
    if value.ndim and value.numel() * value.element_size() > SMALL:
        return None
    return _take_plain(value, None)


# dtype → what the kernel of the statistics calls it, and as in _KNOWN; filled as they come
_CODES: dict[torch.dtype, tuple[int | None, int, int]] = {}


def summarize_tensor(value: torch.Tensor, *, threads: int = stats.AUTO) -> Summary:
    """The statistics of a tensor on the CPU, read where it lies.

    >>> summarize_tensor(torch.tensor([1.0, -3.0])).max_abs
    3.0
    """
    cls = type(value)
    if (cls is torch.Tensor or cls is torch.nn.Parameter) and not _function_modes():
        return _summarize_plain(value, threads)
    found = adapter(cls)
    if found is None or found.summarize is None:
        found = found or refusing(f"a {cls.__name__} is no tensor of torch")
        found.take(value, None, ())  # says why not
        raise CaptureError(f"no statistics of a {cls.__name__}")
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return _summarize_plain(torch.Tensor.as_subclass(value, torch.Tensor), threads)


def _summarize_plain(value: torch.Tensor, threads: int) -> Summary:
    if not value.is_cpu:
        raise NotImplementedError(f"the tensor is on {value.device}: statistics there are not ours")
    try:
        code, itemsize, lazy = _CODES.get(value.dtype) or _learn(value.dtype)
        if code is not None and not (lazy and (value.is_neg() or (lazy == 2 and value.is_conj()))):
            count = value.numel()
            # a nested tensor looks dense but for this
            if ((address := value.data_ptr()) or not count) and not value.is_nested:
                shape: Any = count
                strides = None
                if not value.is_contiguous():
                    shape = tuple(value.shape)
                    strides = tuple([itemsize * stride for stride in value.stride()])
                found: Summary | None = stats.kernel.summarize(
                    address, code, shape, strides, threads
                )
                if found is not None:
                    return found
    except (RuntimeError, KeyError):
        pass  # no storage, or no such dtype: said below
    return _summarize_copy(value, threads)


def _learn(dtype: torch.dtype) -> tuple[int | None, int, int]:
    name, itemsize, lazy = _KNOWN[dtype]
    found = _CODES[dtype] = stats.code_of(name), itemsize, lazy
    return found


def _summarize_copy(value: torch.Tensor, threads: int) -> Summary:
    """The statistics of what has to be resolved or brought here first."""
    node, _ = _take_plain(value, None)
    assert isinstance(node, TensorData)
    return stats.summarize_array(as_numpy(node), threads=threads)


def _summarize(value: torch.Tensor) -> Summary:
    with torch._C.DisableTorchFunction():
        on_cpu = value.is_cpu
    if on_cpu:
        return summarize_tensor(value)
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return _summarize_copy(torch.Tensor.as_subclass(value, torch.Tensor), stats.AUTO)


_PLAIN = Adapter(_take, _nbytes, _describe, _take_small, _summarize)
_SUBCLASS = Adapter(_take_subclass, _subclass_nbytes, _subclass_describe, summarize=_summarize)


def adapter(cls: type) -> Adapter | None:
    """The adapter for a class of tensors."""
    if torch.Tensor not in cls.__mro__:
        return None
    if torch.nn.parameter.UninitializedTensorMixin in cls.__mro__:
        return refusing("an uninitialized parameter has no data: catch it after the first forward")
    if cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # type: ignore[attr-defined]
        refused = refusing(_wrapper_message(cls))
        return replace(refused, local=local_of) if cls.__name__ == "DTensor" else refused
    if cls is torch.Tensor or cls.__torch_function__ is torch._C._disabled_torch_function_impl:  # type: ignore[attr-defined]
        return _PLAIN
    return _SUBCLASS


def _wrapper_message(cls: type) -> str:
    known = {
        "FakeTensor": "a fake tensor has a shape but no data: catch the real one at run time",
        "DTensor": "a DTensor is spread over ranks: catch it by itself, or tensor.full_tensor()",
        "NestedTensor": "a nested tensor has no single shape: catch tensor.values(), or unbind()",
        "AsyncCollectiveTensor": "a collective is still under way: catch tensor.wait()",
    }
    return known.get(
        cls.__name__, f"a {cls.__name__} only wraps other tensors: catch the tensors inside it"
    )


def build(node: TensorData) -> Any:
    """The tensor on the CPU, belonging to the caller; as NumPy where this torch lacks the dtype."""
    view = payload(node)
    dtype = _DTYPES.get(node.dtype)
    if dtype is None:
        return build_numpy(node)
    # whatever mode the caller is in: an ordinary tensor, on the CPU
    with quiet(), torch.inference_mode(False):
        flat = torch.empty(view.nbytes, dtype=torch.uint8, device="cpu")
        if view.nbytes:
            # torch itself would complain about memory that is read-only
            address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
            ctypes.memmove(flat.data_ptr(), address, view.nbytes)
        return flat.view(dtype).view(node.shape)


def _share_threads() -> None:
    """Let the statistics use the threads that torch has, and no more of them."""
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    found = [name for name in os.listdir(folder) if name.startswith(_OPENMP)]
    if stats.kernel is None or len(found) != 1:
        return
    library = ctypes.CDLL(os.path.join(folder, found[0]))  # loaded already: a name for it
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_max_threads")
    calls = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names]
    stats.kernel.use_team(*calls)


_OPENMP = ("libgomp", "libiomp5", "libomp")
with contextlib.suppress(OSError, AttributeError):  # another build of torch: threads of our own
    _share_threads()
