"""Values of every kind, made alike in two processes: one sends them, the other compares."""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any

SMALL = (3, 5)
LARGE = (131, 151)  # more than 16 KiB of any dtype, and no round number

NUMPY = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 "
    "complex64 complex128"
).split()
EIGHT = (
    "float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
    "float8_e5m2fnuz float8_e8m0fnu"
).split()
NARROW = "int2 int4 uint2 uint4".split()
TORCH = [
    *NUMPY, "bfloat16", "complex32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bits16", "bits1x8",
    "bits2x4", "bits4x2", "int1", "int3", "int7", "uint1", "uint4", "uint7",
]  # fmt: skip


def noise(nbytes: int, seed: str) -> bytearray:
    """The same random bytes in every process."""
    return bytearray(random.Random(seed).randbytes(nbytes))


def _numpy_array(dtype: Any, shape: tuple[int, ...], seed: str) -> Any:
    import numpy as np

    dtype = np.dtype(dtype)
    count = int(np.prod(shape))
    raw = noise(count * dtype.itemsize, seed)
    if dtype.name == "bool":
        return (np.frombuffer(raw, np.uint8) & 1).astype(bool).reshape(shape)
    return np.frombuffer(raw, dtype).reshape(shape)  # any bits: NaNs of every kind as well


def numpy_values() -> dict[str, Any]:
    """Every dtype that NumPy and ml_dtypes have, small and large; layouts; scalars."""
    import ml_dtypes
    import numpy as np

    found: dict[str, Any] = {}
    dtypes = {name: np.dtype(name) for name in NUMPY}
    dtypes |= {name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", *EIGHT)}
    dtypes |= {n: np.dtype(n) for n in (">f4", ">i8", "<M8[ns]", "<m8[us]", "|S7", "longdouble")}
    for name, dtype in dtypes.items():
        found[f"{name} small"] = _numpy_array(dtype, SMALL, name)
        found[f"{name} large"] = _numpy_array(dtype, LARGE, name + "+")
        found[f"{name} none"] = np.empty((0, 4), dtype)
        found[f"{name} one"] = _numpy_array(dtype, (), name)
    for name in NARROW:
        low = -1 if name[0] == "i" else 0
        found[name] = np.arange(low, 2).astype(getattr(ml_dtypes, name))
    found["text"] = np.array(["déjà", "vu", ""])
    found["scalar float32"] = np.float32(0.1)
    found["scalar bfloat16"] = ml_dtypes.bfloat16(0.1)
    found["scalar bool"] = np.bool_(True)
    base = _numpy_array(np.float32, (40, 60, 7), "layout")
    found |= {
        "transposed": base.T,
        "sliced": base[3:30, ::2, 1],
        "backwards": base[::-1, ::-3],
        "fortran": np.asfortranarray(base[..., 0]),
        "broadcast": np.broadcast_to(base[0, 0], (90, 80, 7)),
        "read only": np.frombuffer(bytes(noise(64, "ro")), np.int32),
    }
    return found


def _torch_tensor(name: str, shape: tuple[int, ...], seed: str) -> Any:
    import torch

    dtype = getattr(torch, name)
    count = 1
    for length in shape:
        count *= length
    raw = noise(count * dtype.itemsize, seed)
    flat = torch.frombuffer(raw, dtype=torch.uint8)
    if dtype is torch.bool:
        return (flat & 1).bool().reshape(shape)
    return flat.view(dtype).reshape(shape)


def torch_values() -> dict[str, Any]:
    """Every dtype that torch has, small and large; layouts and views of every kind."""
    import torch

    found: dict[str, Any] = {}
    for name in TORCH:
        found[f"{name} small"] = _torch_tensor(name, SMALL, name)
        found[f"{name} large"] = _torch_tensor(name, LARGE, name + "+")
        found[f"{name} none"] = torch.empty((0, 4), dtype=getattr(torch, name))
        found[f"{name} one"] = _torch_tensor(name, (1,), name)[0]
    base = torch.arange(40 * 60 * 7, dtype=torch.float32).reshape(40, 60, 7)
    complexes = _torch_tensor("complex64", (60, 70), "conj")
    found |= {
        "transposed": base[0].T,
        "permuted": base.permute(1, 2, 0),
        "sliced": base[3:30, ::2, 1],
        "offset": base[7],
        "expanded": base[0, 0].expand(90, 80, 7),
        "diagonal": base[:, :, 0].diagonal(),
        "channels last": base.reshape(1, 40, 60, 7).to(memory_format=torch.channels_last),
        "transposed bfloat16": base[:, :, 0].bfloat16().T,
        "transposed float8": _torch_tensor("float8_e5m2", LARGE, "8").T,
        "conj": complexes.conj(),
        "conj small": complexes[:2, :2].conj(),
        "neg": complexes.conj().imag,
        "neg small": complexes[:2, :2].conj().imag,
        "conj transposed": complexes.mH,
        "requires grad": base.clone().requires_grad_(),
        "result": (base.clone().requires_grad_() * 2).sum(),
        "parameter": torch.nn.Parameter(base[:3].clone()),
        "buffer": torch.nn.Buffer(base[:3].clone()),
        "inference": _inference(base),
    }
    return found


def _inference(base: Any) -> Any:
    import torch

    with torch.inference_mode():
        return base * 3


def jax_values() -> dict[str, Any]:
    """Every dtype that JAX has, small and large."""
    import jax

    jax.config.update("jax_enable_x64", True)
    import jax.numpy as jnp
    import ml_dtypes
    import numpy as np

    found: dict[str, Any] = {}
    dtypes = {name: np.dtype(name) for name in NUMPY}
    dtypes |= {name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", *EIGHT)}
    for name, dtype in dtypes.items():
        found[f"{name} small"] = jnp.asarray(_numpy_array(dtype, SMALL, name))
        found[f"{name} large"] = jnp.asarray(_numpy_array(dtype, LARGE, name + "+"))
        found[f"{name} none"] = jnp.asarray(np.empty((0, 4), dtype))
        found[f"{name} one"] = jnp.asarray(_numpy_array(dtype, (), name))
    for name in NARROW:
        low = -1 if name[0] == "i" else 0
        found[name] = jnp.asarray(np.arange(low, 2).astype(getattr(ml_dtypes, name)))
    base = jnp.arange(40 * 60 * 7.0, dtype=jnp.float32).reshape(40, 60, 7)
    found |= {"transposed": base.T, "sliced": base[3:30, ::2, 1]}
    return found


VALUES = {"numpy": numpy_values, "torch": torch_values, "jax": jax_values}


def bits(value: Any) -> tuple[str, str, tuple[int, ...], bytes]:
    """Type, dtype, shape and bytes of an array, whatever its framework."""
    module = type(value).__module__.partition(".")[0]
    if module == "torch":
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

    kind = "jax" if module.startswith("jax") else type(value).__name__
    array = np.asarray(value)
    return kind, str(value.dtype), tuple(value.shape), array.tobytes()


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class State:
    """A dataclass that both processes can import."""

    step: int
    weights: Any
    name: str = "adam"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """One that cannot be set."""

    points: tuple[Point, ...]


def nested() -> dict[str, Any]:
    """Values without a framework, and containers of them."""
    import numpy as np

    array = np.arange(12.0).reshape(3, 4)
    return {
        "none": None,
        "true": True,
        "false": False,
        "int": -7,
        "int64": 2**63 - 1,
        "uint64": 2**64 - 1,
        "big": -(10**400),
        "float": 0.1,
        "inf": float("inf"),
        "tiny": 5e-324,
        "negative zero": -0.0,
        "complex": 1 - 2j,
        "str": "μ=0.01 \x00 🙂",
        "long str": "é" * 100_000,
        "bytes": bytes(range(256)) * 100,
        "bytearray": bytearray(b"abc"),
        "list": [1, [2, [3, []]]],
        "tuple": (1, (2.5, ()), None),
        "dict": {"a": {1: array, 2.5: None}, (1, 2): "key", None: [array[0], {}]},
        "set": {1, 2, 3},
        "frozenset": frozenset({("a", 1)}),
        "namedtuple": Point(array, Point(1, "y")),
        "dataclass": State(3, [array, np.float32(1)]),
        "frozen": Frozen((Point(1, 2), Point(None, True))),
        "everything": [{"p": Point((State(1, {"w": array}),), {4})}, 2**70, b"x", -1j],
    }


def same(a: Any, b: Any) -> bool:
    """Whether two nested values are alike in type, order and every bit."""
    import numpy as np

    if type(a) is not type(b):
        return False
    if isinstance(a, (np.ndarray, np.generic)):
        return bits(a) == bits(b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        names = [field.name for field in dataclasses.fields(a)]
        return all(same(getattr(a, n), getattr(b, n)) for n in names)
    return a == b and repr(a) == repr(b)
