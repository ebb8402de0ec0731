"""MLX behind the `Framework` protocol.

MLX computes lazily: capturing an array evaluates it.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from tensortap.core.buffers import Pool
from tensortap.core.dtypes import DTYPES, numpy_dtype
from tensortap.core.errors import CaptureError
from tensortap.core.record import Summary, TensorData
from tensortap.stats import summarize_array
from tensortap.values.numpy.adapter import build as build_numpy
from tensortap.values.numpy.adapter import tensor_data
from tensortap.values.protocol import Adapter, Framework, Path, Snapshot

_DTYPES = {row.name: getattr(mx, row.mlx) for row in DTYPES.values() if row.mlx}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


class MlxFramework(Framework):
    name = "mlx"

    def adapter(self, cls: type) -> Adapter | None:
        return _ARRAY if mx.array in cls.__mro__ else None

    def rebuild(self, tensor: TensorData) -> Any:
        """Return an array; NumPy's if MLX lacks the dtype."""
        array = build_numpy(tensor)
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            return array
        # by way of integers, which MLX converts neither in dtype nor in bits
        with mx.stream(mx.cpu):
            built = mx.array(array.view(f"u{dtype.size}")).view(dtype)
            mx.eval(built)
        return built


FRAMEWORK = MlxFramework()


def _view(value: Any) -> Any:
    """Return a NumPy array over the memory of an MLX array, which is evaluated."""
    try:
        # the buffer protocol has no bfloat16
        with mx.stream(mx.cpu):
            bits = np.asarray(value.view(_BITS[value.dtype.size]))
    except (RuntimeError, ValueError) as error:
        if "transformation" not in str(error):
            raise
        raise CaptureError(
            "inside mx.compile or mx.vmap an array has no value yet: return it from the function "
            "and catch the result"
        ) from None
    return bits.view(numpy_dtype(_NAMES[value.dtype]))


def _snapshot(value: Any, pool: Pool | None, path: Path) -> Snapshot:
    return tensor_data("mlx", _view(value), pool)


def _nbytes(value: Any, path: Path) -> int:
    return int(value.nbytes)


def _describe(value: Any) -> tuple[str, tuple[int, ...]]:
    return _NAMES[value.dtype], tuple(value.shape)


def _summarize(value: Any) -> Summary:
    return summarize_array(_view(value))


_ARRAY = Adapter(_snapshot, _nbytes, _describe, summarize=_summarize, view=_view)
