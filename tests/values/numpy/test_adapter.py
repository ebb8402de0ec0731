import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensortap.core.buffers import Lease, view_of
from tensortap.core.dtypes import DTYPES as REGISTRY
from tensortap.core.dtypes import numpy_dtype
from tensortap.core.errors import CaptureError, WireError
from tensortap.core.record import TensorData
from tensortap.values import SMALL, describe, nbytes_of, rebuild, snapshot
from tests.values.contract import FrameworkContract

DTYPES = [n for n in REGISTRY if numpy_dtype(n).name == n]
OTHERS = ["<M8[ns]", "<m8[s]", "<U7", "|S5", "|V6", ">f4", ">i8", ">c16", "<f16", "<c32"]

LAYOUTS = {
    "plain": lambda a: a,
    "transposed": lambda a: a.T,
    "sliced": lambda a: a[1:, ::2, ::-1],
    "fortran": np.asfortranarray,
    "broadcast": lambda a: np.broadcast_to(a[:1], (5, *a.shape[1:])),
    "scalar": lambda a: a[0, 0, 0:1].reshape(()),
    "empty": lambda a: a[:0],
}


def any_bytes(dtype, shape):
    """Return an array of random bytes."""
    dtype = np.dtype(dtype)
    random = np.random.default_rng(0)
    raw = random.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    if dtype.kind == "U":
        raw = random.integers(32, 127, raw.size // 4).astype("<u4").view(np.uint8)
    if dtype.kind == "b":
        raw &= 1
    return raw.view(dtype).reshape(shape)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("shape", [(3, 4, 5), (40, 30, 25)], ids=["small", "large"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip_of_every_dtype(layout, shape, pool):
    for name in DTYPES + OTHERS:
        array = LAYOUTS[layout](any_bytes(numpy_dtype(name), shape))
        node, nbytes = snapshot(array, pool)
        assert (node.framework, node.dtype, node.shape) == ("numpy", name, array.shape)
        assert nbytes == nbytes_of(array) == array.nbytes == view_of(node.data).nbytes, name
        assert isinstance(node.data, bytes if nbytes <= SMALL else Lease), name
        assert same_bits(rebuild(node), array), name
        assert describe(array) == ("numpy.ndarray", name, array.shape)


@pytest.mark.parametrize("view", [np.matrix, np.recarray])
def test_subclasses_are_rebuilt_as_arrays(view, pool):
    array = np.arange(6.0).reshape(2, 3).view(view)
    back = rebuild(snapshot(array, pool)[0])
    assert type(back) is np.ndarray
    assert same_bits(back, np.arange(6.0).reshape(2, 3))


SCALARS = [
    np.float32(1.5), np.float64(-0.0), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True),
    np.complex64(1 + 2j), np.longdouble(1) / 3, np.datetime64("2026-11-15T18:15:30", "ns"),
    np.timedelta64(3, "D"), np.datetime64("NaT"), np.float16("nan"), np.void(b"abc"),
]  # fmt: skip


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda s: s.dtype.str + repr(s))
def test_scalars_are_rebuilt_as_scalars(scalar, pool):
    node, nbytes = snapshot(scalar, pool)
    back = rebuild(node)
    assert node.framework == "numpy.generic"
    assert nbytes == nbytes_of(scalar)
    assert type(back) is type(scalar)
    assert back.dtype == scalar.dtype
    assert back.tobytes() == scalar.tobytes()


def test_scalars_of_every_dtype(pool):
    for name in DTYPES:
        scalar = any_bytes(numpy_dtype(name), (1,))[0]
        back = rebuild(snapshot(scalar, pool)[0])
        assert type(back) is type(scalar)
        assert back.tobytes() == scalar.tobytes()


def test_strings_are_captured_as_text(pool):
    for value, plain in ((np.str_("a\0b\0"), "a\0b\0"), (np.bytes_(b"a\0"), b"a\0")):
        back = rebuild(snapshot(value, pool)[0])
        assert type(back) is type(plain)
        assert back == plain


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (np.ma.masked_array([1, 2], [0, 1]), "filled"),
        (np.array([None, 1]), "tolist"),
        (np.zeros(2, [("a", "f4")]), r"array\['a'\]"),
        (np.zeros(1, [("a", "f4")])[0], r"array\['a'\]"),
        (np.array(["a"], np.dtypes.StringDType()), "astype"),
    ],
)
def test_rejects_arrays_with_a_remedy(value, remedy, pool):
    with pytest.raises(CaptureError, match=remedy):
        snapshot(value, pool)
    assert describe(value)[1] == ""
    assert nbytes_of(value) >= 0


@pytest.mark.parametrize(
    "node",
    [
        TensorData("numpy", "object", (1,), b"12345678"),
        TensorData("numpy", "<O8", (1,), b"12345678"),
        TensorData("numpy", "float32", (0, 2**62, 2**62), b""),
        TensorData("numpy", "int8", (1,) * 65, b"1"),
        TensorData("numpy.generic", "<U1", (), b"\xff\xff\xff\xff"),
        TensorData("numpy.generic", "float32", (0,), b""),
        TensorData("numpy.generic", "float32", (2,), b"12345678"),
        TensorData("os", "int8", (1,), b"1"),
    ],
)
def test_rejects_invalid_tensors(node):
    with pytest.raises(WireError):
        rebuild(node)


@pytest.mark.slow
@given(st.binary(max_size=40), st.sampled_from(sorted(REGISTRY)), st.lists(st.integers(0, 5)))
def test_rejects_any_invalid_tensor(data, name, shape):
    for framework in ("numpy", "numpy.generic", "torch"):
        with contextlib.suppress(WireError):
            rebuild(TensorData(framework, name, tuple(shape), data))


class TestNumpy(FrameworkContract):
    framework = "numpy"
    dtypes = tuple(row.name for row in REGISTRY.values() if row.numpy)

    def tensor(self, array, dtype):
        return array

    def contents(self, tensor):
        return tensor.tobytes()
