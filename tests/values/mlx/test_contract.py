import mlx.core as mx
import numpy as np
import pytest

from tensortap.core.buffers import Pool
from tensortap.core.dtypes import DTYPES
from tensortap.core.errors import CaptureError
from tensortap.core.record import TensorData
from tensortap.values import rebuild, snapshot
from tests.values.contract import FrameworkContract


def bits(dtype):
    return getattr(mx, f"uint{8 * dtype.size}")


class TestMlx(FrameworkContract):
    framework = "mlx"
    dtypes = tuple(row.name for row in DTYPES.values() if row.mlx)

    def tensor(self, array, dtype):
        dtype = getattr(mx, DTYPES[dtype].mlx)
        return mx.array(array.view(f"u{dtype.size}")).view(dtype)

    def contents(self, tensor):
        return np.array(tensor.view(bits(tensor.dtype))).tobytes()


def test_every_dtype_of_mlx_has_a_row():
    theirs = {str(getattr(mx, n)) for n in dir(mx) if isinstance(getattr(mx, n), mx.Dtype)}
    assert {str(getattr(mx, row.mlx)) for row in DTYPES.values() if row.mlx} == theirs


@pytest.mark.parametrize("shape", [(3, 4), (100, 200)])
def test_strided_arrays(shape):
    array = mx.arange(shape[0] * shape[1]).reshape(shape)
    for view in (array.T, array[1:, ::2], mx.broadcast_to(array[:1], shape)):
        back = rebuild(snapshot(view, Pool())[0])
        assert np.array_equal(np.array(back), np.array(view))


@pytest.mark.parametrize("transform", [mx.compile, mx.vmap])
def test_rejects_arrays_inside_a_transform(transform):
    def function(array):
        with pytest.raises(CaptureError, match="catch the result"):
            snapshot(array, Pool())
        return array * 2

    mx.eval(transform(function)(mx.ones((2, 3))))


def test_rebuilds_dtypes_that_mlx_lacks_with_numpy():
    back = rebuild(TensorData("mlx", "float8_e5m2", (2,), b"ab"))
    assert type(back) is np.ndarray
    assert back.tobytes() == b"ab"
