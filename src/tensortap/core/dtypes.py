"""The registry of dtypes: one row per dtype, for every framework and file format.

A name says what the bytes mean, whichever framework made them: ``float32`` and ``bfloat16`` are
the same in NumPy, torch, JAX and MLX. Dtypes that only NumPy has go by their ``dtype.str``:
``<M8[ns]``, ``<U5``, ``>f4``. An element narrower than a byte takes one byte, as in NumPy and
torch, except in dtypes that are packed by definition (``float4_e2m1fn_x2``, ``bits4x2``).

To add a dtype, add a row to `_ROWS`. What neither NumPy nor ml_dtypes has is read as unsigned
integers. The C kernel handles every dtype of one byte through a table of its values; a wider one
needs a constant there, which a test checks against this registry.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tensortap.core.errors import CaptureError

if TYPE_CHECKING:
    import numpy as np


class FloatFormat(NamedTuple):
    """Binary floating point: significant digits, exponent of the smallest normal, largest value."""

    digits: int
    least_exponent: int
    largest: float


class DType(NamedTuple):
    """One row: what a dtype is, and what each framework and file format calls it.

    `kind` is bool, int, uint, float, complex or bits (no numbers). `part` is the dtype of the two
    halves of a complex number. A spelling is empty where a framework does not have the dtype;
    NumPy's may come from ``ml_dtypes``.
    """

    name: str
    kind: str
    bits: int
    format: FloatFormat | None
    part: str
    numpy: str
    torch: str
    jax: str
    mlx: str
    safetensors: str

    @property
    def itemsize(self) -> int:
        return -(-self.bits // 8)

    @property
    def is_integer(self) -> bool:
        return self.kind in ("bool", "int", "uint")

    @property
    def exponents(self) -> tuple[int, int]:
        """Exponents of the smallest and of the largest magnitude: ``2**n <= |x| < 2**(n+1)``."""
        if self.format is not None:
            lowest = self.format.least_exponent - (self.format.digits - 1)
            return lowest, math.frexp(self.format.largest)[1] - 1
        if not self.is_integer:
            raise TypeError(f"{self.name} holds no numbers")
        # the smallest int is a power of two that no positive one reaches
        return 0, self.bits - 1


def _row(
    name: str,
    kind: str,
    bits: int,
    frameworks: str,
    safetensors: str = "",
    format: tuple[int, int, float] | None = None,  # noqa: A002  the name of the column
    part: str = "",
) -> DType:
    """Return a row; `frameworks` lists who has the dtype, as ``jax:bool_`` under another name."""
    spelled = {"numpy": "", "torch": "", "jax": "", "mlx": ""}
    for word in frameworks.split():
        framework, _, spelling = word.partition(":")
        if framework == "ml_dtypes":
            framework, spelling = "numpy", f"ml_dtypes.{name}"
        spelled[framework] = spelling or name
    form = None if format is None else FloatFormat(*format)
    return DType(name, kind, bits, form, part, **spelled, safetensors=safetensors)


_HALF = (11, -14, 65504.0)
_SINGLE = (24, -126, (2 - 2**-23) * 2.0**127)
_DOUBLE = (53, -1022, (2 - 2**-52) * 2.0**1023)
_BRAIN = (8, -126, (2 - 2**-7) * 2.0**127)
_ALL = "numpy torch jax mlx"
_INTS = ("int", "uint")

_ROWS = (
    _row("bool", "bool", 1, "numpy torch jax:bool_ mlx:bool_", "BOOL"),
    _row("int8", "int", 8, _ALL, "I8"),
    _row("int16", "int", 16, _ALL, "I16"),
    _row("int32", "int", 32, _ALL, "I32"),
    _row("int64", "int", 64, _ALL, "I64"),
    _row("uint8", "uint", 8, _ALL, "U8"),
    _row("uint16", "uint", 16, _ALL, "U16"),
    _row("uint32", "uint", 32, _ALL, "U32"),
    _row("uint64", "uint", 64, _ALL, "U64"),
    _row("float16", "float", 16, _ALL, "F16", _HALF),
    _row("float32", "float", 32, _ALL, "F32", _SINGLE),
    _row("float64", "float", 64, _ALL, "F64", _DOUBLE),
    _row("bfloat16", "float", 16, "ml_dtypes torch jax mlx", "BF16", _BRAIN),
    _row("complex64", "complex", 64, _ALL, "C64", _SINGLE, "float32"),
    _row("complex128", "complex", 128, "numpy torch jax", "", _DOUBLE, "float64"),
    _row("complex32", "complex", 32, "ml_dtypes torch", "", _HALF, "float16"),
    _row("bcomplex32", "complex", 32, "ml_dtypes", "", _BRAIN, "bfloat16"),
    _row("float8_e3m4", "float", 8, "ml_dtypes jax", "", (5, -2, 15.5)),
    _row("float8_e4m3", "float", 8, "ml_dtypes jax", "", (4, -6, 240.0)),
    _row("float8_e4m3b11fnuz", "float", 8, "ml_dtypes jax", "", (4, -10, 30.0)),
    _row("float8_e4m3fn", "float", 8, "ml_dtypes torch jax", "F8_E4M3", (4, -6, 448.0)),
    _row("float8_e4m3fnuz", "float", 8, "ml_dtypes torch jax", "", (4, -7, 240.0)),
    _row("float8_e5m2", "float", 8, "ml_dtypes torch jax", "F8_E5M2", (3, -14, 57344.0)),
    _row("float8_e5m2fnuz", "float", 8, "ml_dtypes torch jax", "", (3, -15, 57344.0)),
    _row("float8_e8m0fnu", "float", 8, "ml_dtypes torch jax", "F8_E8M0", (1, -127, 2.0**127)),
    _row("float6_e2m3fn", "float", 6, "ml_dtypes jax", "", (4, 0, 7.5)),
    _row("float6_e3m2fn", "float", 6, "ml_dtypes jax", "", (3, -2, 28.0)),
    _row("float4_e2m1fn", "float", 4, "ml_dtypes jax", "", (2, 0, 6.0)),
    *(_row(f"{kind}{n}", kind, n, "ml_dtypes torch jax") for kind in _INTS for n in (1, 2, 4)),
    *(_row(f"{kind}{n}", kind, n, "torch") for kind in _INTS for n in (3, 5, 6, 7)),
    *(_row(f"bits{n}", "bits", 8, "torch") for n in ("8", "1x8", "2x4", "4x2")),
    _row("bits16", "bits", 16, "torch"),
    _row("float4_e2m1fn_x2", "bits", 8, "torch"),
)

DTYPES: dict[str, DType] = {row.name: row for row in _ROWS}
"""The rows by their names."""

_SIZES = {row.name: row.itemsize for row in _ROWS}  # looked up for every record that is read

# what `numpy.dtype.str` gives for dtypes that are not in the registry
_SWAPPED = re.compile(r">[iu][248]|>f[248]|>c(?:8|16)")
_EXTENDED = re.compile(r"[<>](?:f12|f16|c24|c32)")
_TIME = re.compile(r"[<>][Mm]8(?:\[[0-9]{0,9}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")
_TEXT = re.compile(r"(?:([<>]U)|\|[SV])([1-9][0-9]{0,8})")


def itemsize(name: str) -> int:
    size = _SIZES.get(name)
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


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the size that dtype and shape imply; raise ValueError if no tensor has them.

    >>> tensor_nbytes("bfloat16", (2, 3))
    12
    """
    size = itemsize(dtype)
    for length in shape:
        # stop early: the product of a long hostile shape would take hours
        if not 0 <= length < 1 << 62 or size >= 1 << 62:
            size = 1 << 62
            break
        size *= length or 1
    if size >= 1 << 62:
        raise ValueError(f"a tensor of shape {str(shape[:8])[:200]}")
    return 0 if 0 in shape else size


@functools.lru_cache(maxsize=1024)
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype; unsigned integers of its size where NumPy cannot express it."""
    import numpy as np

    size = itemsize(name)
    row = DTYPES.get(name)
    if row is None or row.numpy == name:
        try:
            return np.dtype(name)
        except TypeError:  # an extended precision that this machine does not have
            return np.dtype(f"V{size}")
    scalar = None
    if row.numpy:
        import ml_dtypes

        scalar = getattr(ml_dtypes, name, None)  # older releases lack some
    return np.dtype(f"u{size}" if scalar is None else scalar)


# a plain dict: one lookup per capture, and `dtype.name` takes microseconds
_names: dict[Any, str] = {}


def name_of(dtype: np.dtype[Any]) -> str:
    """Return the name of a NumPy dtype; raise `CaptureError` with a remedy if it has none."""
    name = _names.get(dtype)
    if name is None:
        name = _find_name(dtype)
        if len(_names) < 1024:  # string dtypes come in any width
            _names[dtype] = name
    return name


def _find_name(dtype: Any) -> str:
    if dtype.kind == "O":
        raise CaptureError(
            "an array of Python objects has no bytes to catch: catch array.tolist(), or "
            "array.astype(...) with a numeric dtype"
        )
    if getattr(dtype, "names", None):
        raise CaptureError(
            f"a structured array has no single dtype: catch its fields one by one, "
            f"array[{dtype.names[0]!r}]"
        )
    if dtype.kind == "T":
        raise CaptureError(
            "strings of variable length have no fixed width: catch array.astype('U')"
        )
    native = dtype.byteorder in "=|" or dtype.isnative
    for name in (dtype.name, dtype.str) if native else (dtype.str,):
        try:
            if itemsize(name) == dtype.itemsize and numpy_dtype(name) == dtype:
                return str(name)
        except (ValueError, TypeError):
            continue
    raise CaptureError(f"cannot catch dtype {dtype}: catch array.astype(...) with a supported one")
