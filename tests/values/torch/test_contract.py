import pytest
import torch

from tensortap.core.dtypes import DTYPES
from tests.values.contract import FrameworkContract


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
class TestTorch(FrameworkContract):
    framework = "torch"
    dtypes = tuple(row.name for row in DTYPES.values() if row.torch)
    # torch.save knows no integers of fewer than 8 bits
    no_file = tuple(row.name for row in DTYPES.values() if row.bits < 8 and row.kind != "bool")

    def tensor(self, array, dtype):
        data = bytearray(array.tobytes())
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0).byte()
        return flat.view(getattr(torch, DTYPES[dtype].torch)).view(array.shape)

    def contents(self, tensor):
        return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()

    def is_tensor(self, value):
        return type(value) is torch.Tensor
