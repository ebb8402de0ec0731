from tensortap.core.dtypes import DTYPES
from tests.values.contract import FrameworkContract


class TestNumpy(FrameworkContract):
    framework = "numpy"
    dtypes = tuple(row.name for row in DTYPES.values() if row.numpy)

    def tensor(self, array, dtype):
        return array

    def contents(self, tensor):
        return tensor.tobytes()
