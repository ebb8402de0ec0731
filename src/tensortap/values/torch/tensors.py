"""Snapshots of torch tensors, taken without any operation that torch could notice.

A contiguous tensor on the CPU is copied from its address: nothing is dispatched, so no graph, no
mode, no counter and no random state is affected. Only strided, conjugated, negated and device
tensors go through operations of torch, with all modes off.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch.overrides import has_torch_function

from tensortap.core.buffers import Pool
from tensortap.core.dtypes import DTYPES, numpy_dtype
from tensortap.core.errors import CaptureError
from tensortap.core.record import TensorData
from tensortap.values.numpy.adapter import build as build_numpy
from tensortap.values.numpy.adapter import payload
from tensortap.values.protocol import SMALL, Path, Snapshot
from tensortap.values.torch import private
from tensortap.values.view import payload_at

Result = TypeVar("Result")

_DTYPES: dict[str, torch.dtype] = {
    row.name: getattr(torch, row.torch)
    for row in DTYPES.values()
    if row.torch and hasattr(torch, row.torch)  # older releases lack some
}

# the dtypes of which torch makes negative views; complex ones have conjugate views as well
_NEGATED = (torch.float16, torch.float32, torch.float64)

KNOWN: dict[torch.dtype, tuple[str, int, int]] = {
    dtype: (name, dtype.itemsize, 2 if dtype.is_complex else int(dtype in _NEGATED))
    for name, dtype in _DTYPES.items()
}
"""Name, size, and lazy views of each dtype: 0 none, 1 negative, 2 negative or conjugate."""

# integers of each size: copied bit by bit, which torch supports for them but not for every dtype
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# the fastest way to a few bytes at an address
_SCALAR = {size: (ctypes.c_char * size).from_address for size in (1, 2, 4, 8, 16)}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the registry; torch's own for dtypes that are not in it.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    known = KNOWN.get(dtype)
    return str(dtype).removeprefix("torch.") if known is None else known[0]


def has_values(value: torch.Tensor) -> bool:
    """Return whether a tensor has values yet: meta tensors and parameters of lazy modules do not.

    >>> has_values(torch.ones(2)), has_values(torch.ones(2, device="meta"))
    (True, False)
    """
    return not (isinstance(value, torch.nn.parameter.UninitializedTensorMixin) or value.is_meta)


def is_lazy(value: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a tensor is a negative or conjugate view, whose bytes are not its values."""
    lazy = KNOWN[dtype][2]
    return bool(lazy and (value.is_neg() or (lazy == 2 and value.is_conj())))


def address_of(value: torch.Tensor) -> int:
    """Return the address of the elements; 0 if the storage has been freed, also for a view of it.

    >>> x = torch.ones(6)[3:]
    >>> _ = x.untyped_storage().resize_(0)
    >>> address_of(x)
    0
    """
    address: int = value.data_ptr()
    return address if address != value.storage_offset() * value.element_size() else 0


def _without_modes(function: Callable[..., Result]) -> Callable[..., Result]:
    """Call a function with all modes off: even reading an attribute would run one."""

    def call(value: torch.Tensor, *rest: Any) -> Result:
        if has_torch_function((value,)):
            with private.without_overrides():
                return function(value, *rest)
        return function(value, *rest)

    return call


def snapshot_subclass(value: torch.Tensor, pool: Pool | None, path: Path) -> Snapshot:
    """Copy a tensor of a subclass without running code of the subclass."""
    with private.without_overrides(), torch.no_grad():
        return snapshot_plain(torch.Tensor.as_subclass(value, torch.Tensor), pool)


def snapshot_small(value: torch.Tensor) -> Snapshot | None:
    """Copy a small tensor on the CPU; return None for any other."""
    if has_torch_function((value,)) or not value.is_cpu:
        return None
    if value.ndim and value.numel() * value.element_size() > SMALL:
        return None
    return snapshot_plain(value, None)


def snapshot_plain(value: torch.Tensor, pool: Pool | None, path: Path = ()) -> Snapshot:
    """Copy a plain tensor; modes are off."""
    try:
        name, itemsize, lazy = KNOWN[value.dtype]
        if value.is_cpu and not (lazy and is_lazy(value, value.dtype)):
            if not value.ndim:
                if address := address_of(value):
                    return TensorData("torch", name, (), _SCALAR[itemsize](address).raw), itemsize
            elif value.is_contiguous():
                shape = tuple(value.shape)
                if address := address_of(value):
                    nbytes = math.prod(shape) * itemsize
                    data = payload_at(address, nbytes, pool)
                    return TensorData("torch", name, shape, data), nbytes
    except (RuntimeError, KeyError):
        pass  # no storage, or an unknown dtype: reported below
    return _snapshot_by_torch(value, pool)


snapshot = _without_modes(snapshot_plain)


def _snapshot_by_torch(value: torch.Tensor, pool: Pool | None) -> Snapshot:
    reason = why_not(value)
    if reason:
        raise CaptureError(reason)
    name, itemsize, _ = KNOWN[value.dtype]
    shape = tuple(value.shape)
    nbytes = math.prod(shape) * itemsize
    if not nbytes:
        return TensorData("torch", name, shape, b""), 0
    try:
        with quiet():
            return TensorData("torch", name, shape, _copied(value.detach(), nbytes, pool)), nbytes
    except RuntimeError as error:
        raise CaptureError(f"torch cannot copy this tensor: {error}") from error


def _copied(value: torch.Tensor, nbytes: int, pool: Pool | None) -> Any:
    if value.is_cuda and pool is not None:
        from tensortap.values.torch.cuda import cuda

        return cuda().send(value, nbytes, pool)
    if not value.is_cpu:
        value = value.cpu()
    if nbytes <= SMALL or pool is None:
        data = bytearray(nbytes)
        _copy(value, data)
        return bytes(data) if nbytes <= SMALL else memoryview(data)
    lease = pool.acquire(nbytes)
    _copy(value, lease.writable)
    return lease


def _copy(value: torch.Tensor, memory: Any) -> None:
    source = as_bits(value)
    tensor_over(memory, source).copy_(source)


def tensor_over(memory: Any, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor in C order over `memory`, with the dtype and shape of another."""
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    return flat.view(like.dtype).view(like.shape)


def as_bits(value: torch.Tensor) -> torch.Tensor:
    """Return a view of integers of the same size, which torch copies bit by bit."""
    if value.is_conj() or value.is_neg() or value.element_size() not in _BITS:
        return value
    return value.view(_BITS[value.element_size()])


def quiet() -> contextlib.AbstractContextManager[Any]:
    """Return a context for operations that no mode sees and no graph records."""
    if not (has_torch_function((_NO_TENSOR,)) or private.has_dispatch_modes()):
        no_grad: contextlib.AbstractContextManager[Any] = torch.no_grad()
        return no_grad
    stack = contextlib.ExitStack()
    stack.enter_context(private.without_overrides())
    stack.enter_context(private.without_dispatch_modes())
    stack.enter_context(torch.no_grad())
    return stack


_NO_TENSOR = object()  # asking about it tells whether a mode is active


def view(value: torch.Tensor) -> Any:
    """Return the tensor's own memory as a NumPy array; None where that is impossible.

    >>> view(torch.ones(2, 3).T).strides
    (4, 12)
    """
    if has_torch_function((value,)) or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if not value.is_cpu or why_not(value) or value.is_neg() or value.is_conj():
        return None
    name, itemsize, _ = KNOWN[value.dtype]
    if name == "complex32":  # NumPy has it only as a pair
        return None
    if itemsize > 8:
        return value.detach().numpy()
    return as_bits(value.detach()).numpy().view(numpy_dtype(name))


def why_not(value: torch.Tensor) -> str:
    """Return why a tensor cannot be captured, and what to catch instead; empty if it can."""
    if value.is_nested:
        return "a nested tensor has no single shape: catch tensor.unbind(), or to_padded_tensor(0)"
    if value.layout is not torch.strided:
        return f"a tensor of layout {value.layout} is not dense: catch tensor.to_dense()"
    if value.is_quantized:
        return "a quantized tensor is numbers and a scale: catch tensor.dequantize(), or int_repr()"
    if value.is_meta:
        return "a meta tensor has a shape but no data: catch it after it is materialized"
    if value.dtype not in KNOWN:
        return f"cannot catch dtype {value.dtype}: catch tensor.to(...) with a supported one"
    if not (value.is_cpu or value.is_cuda):
        return ""
    try:
        address = address_of(value)
    except RuntimeError:
        return (
            "inside torch.func (vmap, grad, jvp) a tensor has no memory of its own: return it from "
            "the function and catch the result"
        )
    if value.numel() and not address:
        return (
            "this tensor has no memory: it is being functionalized, or its storage has been freed "
            "(as of resharded parameters): catch it outside the transformed function, or while it "
            "is gathered"
        )
    return ""


@_without_modes
def nbytes(value: torch.Tensor, path: Path) -> int:
    try:
        return int(value.numel() * value.element_size())
    except RuntimeError:
        return 0  # nested: `snapshot` says why


@_without_modes
def describe(value: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    try:
        return dtype_name(value.dtype), tuple(value.shape)
    except RuntimeError:
        return dtype_name(value.dtype), ()


def build(tensor: TensorData) -> Any:
    """Return a tensor on the CPU that belongs to the caller; NumPy's if torch lacks the dtype."""
    view = payload(tensor)
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        return build_numpy(tensor)
    with quiet(), torch.inference_mode(False):  # whatever mode the caller is in
        flat = torch.empty(view.nbytes, dtype=torch.uint8, device="cpu")
        if view.nbytes:
            # torch.frombuffer would warn about read-only memory
            address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
            ctypes.memmove(flat.data_ptr(), address, view.nbytes)
        return flat.view(dtype).view(tensor.shape)


# -- copies on the same device ----------------------------------------------------------


def copied_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return a detached copy on the same device.

    >>> x = torch.ones(2, requires_grad=True) * 2
    >>> copied_tensor(x).requires_grad
    False
    """
    with quiet(), torch.inference_mode(False):
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
