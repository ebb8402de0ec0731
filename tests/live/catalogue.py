"""Arrays of every dtype, made alike in two processes: one sends them, the other compares."""

from __future__ import annotations

import math
import random
from typing import Any

SHAPES = {"small": (3, 5), "large": (131, 151), "none": (0, 4), "one": ()}  # large: over 16 KiB

NUMPY = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 "
    "complex64 complex128"
).split()
EIGHT = (
    "float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
    "float8_e5m2fnuz float8_e8m0fnu"
).split()
TORCH = [
    *NUMPY, "bfloat16", "complex32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bits16", "bits1x8",
    "bits2x4", "bits4x2", "int1", "int3", "int7", "uint1", "uint4", "uint7",
]  # fmt: skip


def noise(nbytes: int, seed: str) -> bytearray:
    """The same random bytes in every process: NaNs of every kind as well."""
    return bytearray(random.Random(seed).randbytes(nbytes))


def numpy_values() -> dict[str, Any]:
    """Every dtype that NumPy and ml_dtypes have, in every shape; a strided array; a scalar."""
    import ml_dtypes
    import numpy as np

    dtypes = {name: np.dtype(name) for name in NUMPY}
    dtypes |= {name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", *EIGHT)}
    dtypes |= {n: np.dtype(n) for n in (">f4", ">i8", "<M8[ns]", "<m8[us]", "|S7", "longdouble")}
    found: dict[str, Any] = {}
    for name, dtype in dtypes.items():
        for size, shape in SHAPES.items():
            raw = noise(math.prod(shape) * dtype.itemsize, name + size)
            if name == "bool":
                raw = bytearray(byte & 1 for byte in raw)
            found[f"{name} {size}"] = np.frombuffer(raw, dtype).reshape(shape)
    found["int4"] = np.arange(-1, 2).astype(ml_dtypes.int4)
    found["text"] = np.array(["déjà", "vu", ""])
    found["scalar"] = ml_dtypes.bfloat16(0.1)
    found["sliced"] = found["float32 large"][::-3, ::2]
    return found


def torch_values() -> dict[str, Any]:
    """Every dtype that torch has, in every shape; a strided tensor; lazy bits; a parameter."""
    import torch

    found: dict[str, Any] = {}
    for name in TORCH:
        dtype = getattr(torch, name)
        for size, shape in SHAPES.items():
            if not math.prod(shape):
                found[f"{name} {size}"] = torch.empty(shape, dtype=dtype)
                continue
            raw = torch.frombuffer(
                noise(math.prod(shape) * dtype.itemsize, name + size), dtype=torch.uint8
            )
            flat = (raw & 1).bool() if name == "bool" else raw.view(dtype)
            found[f"{name} {size}"] = flat.reshape(shape)
    found["sliced"] = found["float32 large"][3:30, ::2]
    found["conj transposed"] = found["complex64 large"].mH
    found["neg"] = found["complex64 large"].conj().imag
    found["parameter"] = torch.nn.Parameter(found["float32 small"])
    return found


VALUES = {"numpy": numpy_values, "torch": torch_values}


def bits(value: Any) -> tuple[str, str, tuple[int, ...], bytes]:
    """Type, dtype, shape and bytes of an array, whatever its framework."""
    if type(value).__module__.partition(".")[0] == "torch":
        import torch

        with torch.no_grad():
            plain = torch.Tensor.as_subclass(value.detach(), torch.Tensor)
            if plain.dtype.is_complex or (plain.dtype.is_floating_point and plain.is_neg()):
                plain = plain.resolve_conj().resolve_neg()
            if not plain.numel():
                return "torch", str(plain.dtype), tuple(plain.shape), b""
            if not plain.is_contiguous():
                plain = plain.contiguous()
            raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return "torch", str(plain.dtype), tuple(plain.shape), raw
    import numpy as np

    array = np.asarray(value)
    return type(value).__name__, str(value.dtype), tuple(value.shape), array.tobytes()
