"""Arrays of every dtype, made alike in two processes: one sends them, the other compares."""

from __future__ import annotations

from typing import Any

from tensortap.core.dtypes import DTYPES
from tensortap.rooms.doctor.contract import any_values

SHAPES = {"small": (3, 5), "large": (131, 151), "none": (0, 4), "one": ()}  # large: over 16 KiB


def numpy_values() -> dict[str, Any]:
    """Every dtype that NumPy and ml_dtypes have, in every shape; a strided array; a scalar."""
    import ml_dtypes
    import numpy as np

    names = [row.name for row in DTYPES.values() if row.numpy]
    found: dict[str, Any] = {
        f"{name} {size}": any_values(name, shape)
        for name in names
        for size, shape in SHAPES.items()
    }
    raw = np.resize(np.arange(256, dtype=np.uint8), 112)
    for name in (">f4", ">i8", "<M8[ns]", "<m8[us]", "|S7", "longdouble"):
        found[name] = raw.view(name)
    found["text"] = np.array(["déjà", "vu", ""])
    found["scalar"] = ml_dtypes.bfloat16(0.1)
    found["sliced"] = found["float32 large"][::-3, ::2]
    return found


def torch_values() -> dict[str, Any]:
    """Every dtype that torch has, in every shape; a strided tensor; lazy bits; a parameter."""
    import torch

    from tensortap.rooms.doctor.torch import TorchContract

    make = TorchContract().tensor
    found: dict[str, Any] = {
        f"{row.name} {size}": make(any_values(row.name, shape), row.name)
        for row in DTYPES.values()
        if row.torch
        for size, shape in SHAPES.items()
    }
    found["sliced"] = found["float32 large"][3:30, ::2]
    found["conj transposed"] = found["complex64 large"].mH
    found["neg"] = found["complex64 large"].conj().imag
    found["parameter"] = torch.nn.Parameter(found["float32 small"])
    return found


VALUES = {"numpy": numpy_values, "torch": torch_values}


def bits(value: Any) -> tuple[str, str, tuple[int, ...], bytes]:
    """Type, dtype, shape and bytes of an array, whatever its framework."""
    from tensortap.rooms.doctor.torch import TorchContract

    if type(value).__module__.partition(".")[0] == "torch":
        contents = TorchContract().contents(value.detach().resolve_conj().resolve_neg())
        return "torch", str(value.dtype), tuple(value.shape), contents
    return type(value).__name__, str(value.dtype), tuple(value.shape), value.tobytes()
