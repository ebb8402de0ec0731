"""The summary of numbers in memory: by the C kernel where it was built, else by NumPy.

The kernel goes over the memory once, without the interpreter and, if there is much of it, with
several threads; the figures do not depend on how many. What it does not know (byte orders that
are not the machine's, longdouble, complex numbers in halves) goes through `stats.cpu`.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

from tensortap.dtypes import numpy_dtype
from tensortap.record import Summary
from tensortap.stats import numpy_summary as cpu
from tensortap.stats import values

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

kernel: Any
try:
    from tensortap.stats import _kernel  # type: ignore[attr-defined]

    kernel = _kernel
    kernel.set_summary(Summary)
except ImportError:  # no compiler when it was installed
    kernel = None

AUTO = 0
"""As many threads as the process may use, eight at most, and only where they are worth it."""


def summarize_array(array: NDArray[Any], *, threads: int = AUTO) -> Summary:
    """The statistics of an array: exact counts, figures over the finite values.

    Complex numbers count by their magnitude. Where no value is finite (an empty array, all
    NaN), every figure is nan. Arrays that hold no numbers raise TypeError.

    >>> import numpy as np
    >>> s = summarize_array(np.array([1.0, -3.0, 0.0, np.nan]))
    >>> s.count, s.zeros, s.nans, s.min, s.max, s.exponents
    (4, 1, 1, -3.0, 1.0, {0: 1, 1: 1})
    """
    import numpy as np

    array = np.asarray(array)
    code = _code_of(array.dtype)
    if code is not None:
        strides = None if array.flags.c_contiguous else array.strides
        address = array.__array_interface__["data"][0]  # a third of the time of array.ctypes
        found = kernel.summarize(address, code, array.shape, strides, threads)
        if found is not None:
            summary: Summary = found
            return summary
    return cpu.summarize_array(array)


def summarize_memory(
    address: int,
    dtype: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    *,
    threads: int = AUTO,
) -> Summary:
    """The statistics of an array that is only known by its address.

    `strides` are in bytes; None is C order. The memory must stay where it is meanwhile.

    >>> import numpy as np
    >>> x = np.array([1.0, -3.0, 2.0], np.float32)
    >>> summarize_memory(x.ctypes.data, "float32", (3,)).mean
    0.0
    """
    code = code_of(dtype)
    if code is not None:
        found = kernel.summarize(address, code, shape, strides, threads)
        if found is not None:
            summary: Summary = found
            return summary
    return cpu.summarize_array(_array_at(address, dtype, shape, strides))


@functools.cache
def code_of(dtype: str) -> int | None:
    """What the kernel calls a dtype; None if it can't, or if there is no kernel.

    >>> code_of("no such thing")
    """
    if kernel is None:
        return None
    known = getattr(kernel, dtype.upper(), None)
    if isinstance(known, int):
        return known
    try:
        native = numpy_dtype(dtype)
        values.check(native)
    except (TypeError, ValueError):
        return None
    if native.itemsize != 1 or native.name != dtype:
        return None
    code: int = kernel.add_table(cpu.pattern_values(native).tobytes())
    return code


@functools.cache
def _code_of(dtype: np.dtype[Any]) -> int | None:
    return code_of(dtype.name) if dtype.isnative and dtype.fields is None else None


def _array_at(
    address: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> NDArray[Any]:
    import numpy as np

    native = numpy_dtype(dtype)
    if 0 in shape:
        return np.empty(shape, native)
    if strides is None:
        strides = np.empty(shape, np.void(native.itemsize).dtype).strides
    reaches = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    before = -sum(min(reach, 0) for reach in reaches)
    nbytes = before + sum(max(reach, 0) for reach in reaches) + native.itemsize
    memory = memoryview((ctypes.c_char * nbytes).from_address(address - before))
    found: NDArray[Any] = np.ndarray(shape, native, memory, before, strides)
    return found
