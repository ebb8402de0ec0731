import jax
import numpy as np

from tensortap.core.dtypes import DTYPES
from tests.values.contract import FrameworkContract

# JAX computes 64-bit dtypes in 32 bits unless x64 is on, and has no arrays of 6-bit floats
MISSING = {"int64", "uint64", "float64", "complex128", "float6_e2m3fn", "float6_e3m2fn"}


class TestJax(FrameworkContract):
    framework = "jax"
    dtypes = tuple(row.name for row in DTYPES.values() if row.jax and row.name not in MISSING)

    def tensor(self, array, dtype):
        return jax.device_put(array)

    def contents(self, tensor):
        return np.asarray(tensor).tobytes()

    def is_tensor(self, value):
        return isinstance(value, jax.Array)
