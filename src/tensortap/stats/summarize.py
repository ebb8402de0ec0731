"""The summary of numbers in memory: by the C kernel if it was built, otherwise by NumPy.

The kernel reads the memory once, without the interpreter lock, and large arrays with several
threads; the figures do not depend on their number. NumPy handles what the kernel does not: foreign
byte orders, and complex numbers with 16-bit parts.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.core.dtypes import numpy_dtype
from tensortap.core.record import Summary
from tensortap.stats import numpy_summary
from tensortap.stats.conversion import as_float64, check_numeric

kernel: Any
try:
    from tensortap.stats import _kernel

    kernel = _kernel
    kernel.set_summary(Summary)
except ImportError:  # no compiler at installation
    kernel = None

AUTO = 0
"""As many threads as the process may use, at most eight, and only for large arrays."""


def summarize_array(array: NDArray[Any], *, threads: int = AUTO) -> Summary:
    """Return the statistics of an array: exact counts, and figures over the finite values.

    Complex numbers count by their magnitude. If no value is finite (an empty array, all NaN), all
    figures are nan. Raise TypeError for an array that does not hold numbers.

    >>> import numpy as np
    >>> s = summarize_array(np.array([1.0, -3.0, 0.0, np.nan]))
    >>> s.count, s.zeros, s.nans, s.min, s.max, s.exponents
    (4, 1, 1, -3.0, 1.0, {0: 1, 1: 1})
    """
    array = np.asarray(array)
    code = kernel_code(array.dtype)
    if code is not None:
        strides = None if array.flags.c_contiguous else array.strides
        address = array.__array_struct__  # a microsecond faster than __array_interface__
        summary: Summary | None = kernel.summarize(address, code, array.shape, strides, threads)
        if summary is not None:
            return summary
    return numpy_summary.summarize_array(array)


@functools.cache
def code_of(dtype: str) -> int | None:
    """Return the kernel's code for a dtype, or None if it has none or was not built."""
    if kernel is None:
        return None
    known = getattr(kernel, dtype.upper(), None)
    if isinstance(known, int):
        return known
    try:
        native = numpy_dtype(dtype)
        check_numeric(native)
    except (TypeError, ValueError):
        return None
    if native.itemsize != 1 or native.name != dtype:
        return None
    values = as_float64(np.arange(256, dtype=np.uint8).view(native))
    code: int = kernel.add_table(values.tobytes())
    return code


@functools.cache
def kernel_code(dtype: np.dtype[Any]) -> int | None:
    """Return the kernel's code for a NumPy dtype, or None."""
    return code_of(dtype.name) if dtype.isnative and dtype.fields is None else None
