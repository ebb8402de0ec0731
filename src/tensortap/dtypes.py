"""The names of dtypes: how many bytes an element takes, and what NumPy calls it.

A name says what the bytes mean, whoever made them: ``float32`` and ``bfloat16`` are the same in
NumPy, torch and JAX. What only NumPy has goes by its ``dtype.str``: ``<M8[ns]``, ``<U5``, ``>f4``.
Elements narrower than a byte take one byte each, as in NumPy and torch, except in the dtypes
that are packed by their own definition (``float4_e2m1fn_x2``, ``bits4x2``).
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from tensortap.errors import CaptureError

if TYPE_CHECKING:
    import numpy as np

_NUMPY = {
    "bool": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "float16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip

_ML_DTYPES = {
    "bfloat16": 2, "complex32": 4, "bcomplex32": 4,
    "float8_e3m4": 1, "float8_e4m3": 1, "float8_e4m3b11fnuz": 1, "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float6_e2m3fn": 1, "float6_e3m2fn": 1, "float4_e2m1fn": 1,
    "int1": 1, "int2": 1, "int4": 1, "uint1": 1, "uint2": 1, "uint4": 1,
}  # fmt: skip

_TORCH = {
    "float4_e2m1fn_x2": 1, "int3": 1, "int5": 1, "int6": 1, "int7": 1,
    "uint3": 1, "uint5": 1, "uint6": 1, "uint7": 1,
    "bits8": 1, "bits16": 2, "bits1x8": 1, "bits2x4": 1, "bits4x2": 1,
}  # fmt: skip

ITEMSIZE: dict[str, int] = {**_NUMPY, **_ML_DTYPES, **_TORCH}

# what `numpy.dtype.str` gives for the dtypes that have no name of their own above
_SWAPPED = re.compile(r">[iu][248]|>f[248]|>c(?:8|16)")
_EXTENDED = re.compile(r"[<>](?:f12|f16|c24|c32)")
_TIME = re.compile(r"[<>][Mm]8(?:\[[0-9]{0,9}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")
_TEXT = re.compile(r"(?:([<>]U)|\|[SV])([1-9][0-9]{0,8})")


def itemsize(name: str) -> int:
    """How many bytes an element of the dtype called `name` takes; names of strangers are safe.

    >>> itemsize("bfloat16"), itemsize("<U5"), itemsize("<M8[ns]")
    (2, 20, 8)
    """
    size = ITEMSIZE.get(name)
    return _itemsize_of_str(name) if size is None else size


def _itemsize_of_str(name: str) -> int:
    if len(name) <= 32:
        if match := _TEXT.fullmatch(name):
            return int(match[2]) * (4 if match[1] else 1)
        if _TIME.fullmatch(name):
            return 8
        if _SWAPPED.fullmatch(name) or _EXTENDED.fullmatch(name):
            return int(name[2:])
    raise ValueError(f"no dtype is called {name[:40]!r}")


@functools.lru_cache(maxsize=1024)
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype for `name`; unsigned integers of its size where NumPy can't express it.

    >>> numpy_dtype("float32")
    dtype('float32')
    """
    import numpy as np

    size = itemsize(name)
    if name in _ML_DTYPES:
        import ml_dtypes

        scalar = getattr(ml_dtypes, name, None)  # the younger dtypes are not in every release
        return np.dtype(f"u{size}") if scalar is None else np.dtype(scalar)
    if name in _TORCH:
        return np.dtype(f"u{size}")
    try:
        return np.dtype(name)
    except TypeError:  # an extended precision that this machine hasn't got
        return np.dtype(f"V{size}")


# a dict of its own: a lookup per capture, and `dtype.name` takes microseconds
_names: dict[Any, str] = {}


def name_of(dtype: np.dtype[Any]) -> str:
    """The name of a NumPy dtype, or a `CaptureError` that says what to catch instead.

    >>> import numpy
    >>> name_of(numpy.dtype("float32")), name_of(numpy.dtype(">i2"))
    ('float32', '>i2')
    """
    name = _names.get(dtype)
    if name is None:
        name = _find_name(dtype)
        if len(_names) < 1024:  # widths of strings are without end
            _names[dtype] = name
    return name


def _find_name(dtype: Any) -> str:
    kind = str(dtype.kind)
    if kind == "O":
        raise CaptureError(
            "an array of Python objects has no bytes to catch: catch array.tolist(), or "
            "array.astype(...) of a numeric dtype"
        )
    if getattr(dtype, "names", None):
        raise CaptureError(
            f"a structured array has no single dtype: catch its fields one by one, "
            f"array[{dtype.names[0]!r}]"
        )
    if kind == "T":
        raise CaptureError("strings of any length have no width: catch array.astype('U')")
    native = dtype.byteorder in "=|" or dtype.isnative
    if native and ITEMSIZE.get(dtype.name) == dtype.itemsize and dtype == numpy_dtype(dtype.name):
        return str(dtype.name)
    name = str(dtype.str)
    try:
        known = itemsize(name) == dtype.itemsize and numpy_dtype(name) == dtype
    except (ValueError, TypeError):
        known = False
    if not known:
        raise CaptureError(f"dtype {dtype} can't be caught: catch array.astype(...) of a known one")
    return name
