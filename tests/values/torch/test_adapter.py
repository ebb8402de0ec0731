import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensortap.core.buffers import Lease, Pool, view_of
from tensortap.core.dtypes import DTYPES
from tensortap.core.errors import CaptureError
from tensortap.core.record import TensorData
from tensortap.rooms.doctor.torch import TorchContract
from tensortap.values import SMALL, describe, nbytes_of, rebuild, snapshot
from tensortap.values.torch.tensors import _DTYPES, _snapshot_by_torch
from tests.values.contract import FrameworkContract

POOL = Pool()

LAYOUTS = {
    "plain": lambda t: t,
    "transposed": lambda t: t.permute(2, 1, 0),
    "sliced": lambda t: t[1:, ::2],
    "expanded": lambda t: t[:1].expand(5, -1, -1),
    "offset": lambda t: t.reshape(-1)[3:],
    "scalar": lambda t: t[1, 2, 3],
    "empty": lambda t: t[:0],
}


def any_bytes(dtype, shape):
    """Return a tensor of random bytes."""
    random = np.random.default_rng(0)
    raw = random.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    if dtype == torch.bool:
        raw &= 1
    return torch.from_numpy(raw).view(dtype).view(shape)


def raw(tensor):
    """Return the bytes of a tensor in C order, without the adapter."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.element_size() == 16:
        return torch.view_as_real(tensor).contiguous().numpy().tobytes()
    ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(ints[tensor.element_size()]).contiguous().numpy().tobytes()


def check(tensor, pool=POOL):
    node, nbytes = snapshot(tensor, pool)
    assert node.framework == "torch"
    assert node.shape == tuple(tensor.shape)
    assert nbytes == nbytes_of(tensor) == view_of(node.data).nbytes
    back = rebuild(node)
    assert type(back) is torch.Tensor
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert back.device.type == "cpu"
    assert not back.requires_grad
    assert raw(back) == raw(tensor)
    return node


@pytest.mark.parametrize("shape", [(3, 4, 5), (40, 30, 25)], ids=["small", "large"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip_of_every_dtype(layout, shape):
    for name in _DTYPES:
        tensor = LAYOUTS[layout](any_bytes(getattr(torch, name), shape))
        node = check(tensor)
        assert node.dtype == name
        assert isinstance(node.data, bytes if nbytes_of(tensor) <= SMALL else Lease), name
        assert describe(tensor) == ("torch.Tensor", name, tuple(tensor.shape))


@given(st.data())
def test_round_trip_of_strided_views(data):
    shape = data.draw(st.lists(st.integers(0, 6), max_size=4))
    tensor = torch.arange(int(np.prod(shape)), dtype=torch.int32).view(shape)
    tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    for axis, length in enumerate(tensor.shape):
        start = data.draw(st.integers(0, length))
        tensor = tensor.narrow(axis, start, length - start)
        if tensor.shape[axis]:
            tensor = tensor[
                (slice(None),) * axis + (slice(None, None, data.draw(st.integers(1, 3))),)
            ]
    check(tensor)


COMPLEX = [torch.complex32, torch.complex64, torch.complex128]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("shape", [(), (3, 4), (100, 90)])
@pytest.mark.parametrize("dtype", COMPLEX)
@pytest.mark.parametrize("view", ["conj", "imag", "transposed"])
def test_conjugate_and_negative_views(view, dtype, shape):
    values = torch.linspace(1, 2, int(np.prod(shape))).reshape(shape)
    tensor = torch.complex(values, values + 1).to(dtype).conj()
    if view == "imag":
        tensor = tensor.imag
        assert tensor.is_neg()
    if view == "transposed":
        tensor = tensor.mT if tensor.ndim else tensor
    node, _ = snapshot(tensor, POOL)
    assert torch.equal(rebuild(node).to(torch.complex128), tensor.to(torch.complex128))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_rejects_what_torch_cannot_copy():
    tensor = torch._neg_view(torch.ones(3, dtype=torch.complex32).conj())
    with pytest.raises(CaptureError, match="not implemented"):
        snapshot(tensor, POOL)


def test_invalid_bools_keep_their_bits():
    tensor = torch.tensor([[2, 0, 255], [1, 1, 0]], dtype=torch.uint8).view(torch.bool)
    check(tensor)
    check(tensor.T)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.nn.Parameter(torch.randn(3, 4)),
        torch.nn.Parameter(torch.randn(200, 300)),
        torch.nn.Buffer(torch.randn(3)),
        torch.randn(3, requires_grad=True) * 2,
        torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
        torch.randn(3).share_memory_(),
        torch.empty(0, 2**40),
    ],
    ids=["parameter", "large", "buffer", "in a graph", "channels last", "shared", "empty"],
)
def test_kinds_of_tensors(tensor):
    check(tensor)
    if isinstance(tensor, torch.nn.Parameter):
        assert describe(tensor)[:2] == ("torch.nn.parameter.Parameter", "float32")


class Tagged(torch.Tensor):
    """A subclass that raises if one of its operations runs."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


@pytest.mark.parametrize("shape", [(), (3, 4), (200, 300)])
def test_runs_no_code_of_subclasses(shape):
    plain = torch.randn(shape)
    with torch._C.DisableTorchFunction():
        tagged = plain.as_subclass(Tagged)
        strided = tagged.t() if len(shape) == 2 else tagged
    for tensor, expected in ((tagged, plain), (strided, plain.t() if shape else plain)):
        back = rebuild(snapshot(tensor, POOL)[0])
        assert type(back) is torch.Tensor
        assert torch.equal(back, expected)
        assert nbytes_of(tensor) == plain.nbytes
        assert describe(tensor)[1:] == ("float32", tuple(expected.shape))


def fake():
    with torch._subclasses.FakeTensorMode():
        return torch.empty(3)


def freed():
    tensor = torch.zeros(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def wrapped():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (3,))

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError

    return Wrapper()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: torch.eye(3).to_sparse(), "to_dense"),
        (lambda: torch.eye(3).to_sparse_csr(), "to_dense"),
        (lambda: torch.eye(3).to_mkldnn(), "to_dense"),
        (lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8), "dequantize"),
        (lambda: torch.empty(3, device="meta"), "materialized"),
        (fake, "run time"),
        (freed, "freed"),
        (wrapped, "inside it"),
        (lambda: torch.nn.UninitializedParameter(), "first forward"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "unbind"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "unbind",
        ),
    ],
)
def test_rejects_tensors_with_a_remedy(make, remedy):
    value = make()
    with pytest.raises(CaptureError, match=remedy):
        snapshot(value, POOL)
    with pytest.raises(CaptureError, match=rf"at \['x'\]\[1\]: .*{remedy}"):
        snapshot({"x": [1, value]}, POOL)
    assert describe(value)[0].startswith(("torch", "test_torch", "tests"))
    assert nbytes_of(value) >= 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("transform", [torch.vmap, torch.func.functionalize, torch.func.grad])
def test_rejects_tensors_inside_torch_func(transform):
    def function(x):
        with pytest.raises(CaptureError, match=r"inside torch\.func|functionalized"):
            snapshot(x, POOL)
        return x.sum()

    transform(function)(torch.ones(2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode_duals():
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(3), torch.ones(3))
        node, _ = snapshot(dual, POOL)
    assert rebuild(node).tolist() == [1, 1, 1]


def test_copies_from_other_devices_at_once(monkeypatch):
    """A tensor on the CPU claims to be elsewhere, as on mps and xpu."""

    class Elsewhere(torch.Tensor):
        is_cpu = False

    tensor = torch.randn(3, 4)
    calls = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: calls.append(t) or t, raising=True)
    monkeypatch.setattr(torch.Tensor, "detach", lambda t: t.as_subclass(Elsewhere), raising=True)
    node, _ = _snapshot_by_torch(tensor, POOL)
    assert len(calls) == 1
    assert node.data == ctypes.string_at(tensor.data_ptr(), 48)


def test_rebuilds_dtypes_that_torch_lacks_with_numpy():
    back = rebuild(TensorData("torch", "float6_e2m3fn", (2,), b"\x01\x02"))
    assert isinstance(back, np.ndarray)
    assert back.tobytes() == b"\x01\x02"


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
class TestTorch(TorchContract, FrameworkContract):
    # torch.save knows no integers of fewer than 8 bits
    no_file = tuple(row.name for row in DTYPES.values() if row.bits < 8 and row.kind != "bool")
