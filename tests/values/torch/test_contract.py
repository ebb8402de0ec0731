import pytest

from tensortap.core.dtypes import DTYPES
from tensortap.rooms.doctor.torch import TorchContract
from tests.values.contract import FrameworkContract


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
class TestTorch(TorchContract, FrameworkContract):
    # torch.save knows no integers of fewer than 8 bits
    no_file = tuple(row.name for row in DTYPES.values() if row.bits < 8 and row.kind != "bool")
