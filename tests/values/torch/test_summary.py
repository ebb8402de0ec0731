from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

import tensortap as tap
from tensortap.core.errors import CaptureError
from tensortap.core.record import Summary
from tensortap.rooms.track.batches import summarize_tensors
from tensortap.stats import summarize_array
from tensortap.values.torch import summarize as module
from tensortap.values.torch.summarize import summarize


def values() -> torch.Tensor:
    x = torch.linspace(-7, 7, 1200, dtype=torch.float64)
    x[5] = 0.0
    return x


def same(got: Summary, want: Summary) -> None:
    assert (got.count, got.zeros, got.exponents) == (want.count, want.zeros, want.exponents)
    assert (got.min, got.max, got.min_abs) == (want.min, want.max, want.min_abs)
    assert [got.mean, got.std, got.rm8] == pytest.approx([want.mean, want.std, want.rm8], 1e-12)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.expand(5, -1), lambda x: x[::7], torch.nn.Parameter,
        lambda x: x.view(20, 60)[:, :0].t(), lambda x: x[3], torch._neg_view,
    ],
)  # fmt: skip
def test_views(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = change(values().float())
    want = x.detach().resolve_neg().contiguous().numpy()
    if want.size:
        same(summarize(x), summarize_array(want))
    assert summarize(x).count == want.size


def test_lazy_complex_views() -> None:
    x = torch.complex(values(), -values())
    same(summarize(x.conj()), summarize(x))
    same(summarize(x.conj().imag), summarize_array(x.imag.neg().numpy()))


ORDINARY = {
    "strided": lambda x: x.view(20, 60).t(),
    "expanded": lambda x: x[:3].expand(2, 3),
    "offset": lambda x: x[5:],
    "empty": lambda x: x[:0],
    "scalar": lambda x: x[3],
    "leaf": lambda x: x.clone().requires_grad_(),
    "parameter": torch.nn.Parameter,
    "lazy clone": torch._lazy_clone,
    **{
        str(dtype): lambda x, d=dtype: x.to(d)
        for dtype in (torch.float16, torch.bfloat16, torch.int64)
    },
}
UNUSUAL = {
    "negative view": torch._neg_view,
    "negative part": lambda x: torch.complex(x, x).conj().imag,
    "complex": lambda x: torch.complex(x, x),
    "bool": lambda x: x > 0,
    "sparse": lambda x: x.to_sparse(),
    "CSR": lambda x: x.view(20, 60).to_sparse_csr(),
    "MKL-DNN": lambda x: x.to_mkldnn(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:3]]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x[:3]], layout=torch.jagged),
    "meta": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("make", ORDINARY.values(), ids=ORDINARY)
def test_kernel_finds_ordinary_tensors(make: Callable[[torch.Tensor], Any]) -> None:
    x = make(values().float())
    found = summarize_tensors([x, x])
    assert found is not None
    assert msgspec.msgpack.encode(found.summaries()) == msgspec.msgpack.encode([summarize(x)] * 2)


@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
@pytest.mark.filterwarnings("ignore")
def test_kernel_leaves_unusual_tensors_to_python(make: Callable[[torch.Tensor], Any]) -> None:
    x = values().float()
    assert summarize_tensors([x, make(x)]) is None


def test_kernel_leaves_transformed_tensors_to_python() -> None:
    found = []

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(summarize_tensors([x]))
        return x.sum()

    torch.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(torch.ones(3))
    torch.func.functionalize(look)(torch.ones(3))
    assert found == [None] * 3


class Marked(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("code of the subclass ran")


def test_runs_no_code_of_subclasses() -> None:
    with torch._C.DisableTorchFunction():
        x = values().as_subclass(Marked)
    same(summarize(x), summarize_array(values().numpy()))


def test_modes_do_not_see_statistics(modes) -> None:
    x = values()
    y = x.view(20, 60).t()
    with modes() as seen:
        summarize(x)
        summarize(y)
        assert summarize_tensors([x, y]) is None
        assert not seen


def test_rejects_wrappers() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(3)
    with pytest.raises(CaptureError, match="fake tensor"):
        tap.viz.summarize(fake)
    with pytest.raises(CaptureError, match=r"torch\.func"):
        torch.vmap(lambda x: summarize(x) and x)(torch.ones(2, 3))


@pytest.mark.parametrize("view", [slice(None), slice(3, None), slice(2, None, 2)])
def test_rejects_freed_storage(view: slice) -> None:
    freed = torch.ones(6)[view]  # the address of a view is its offset then
    freed.untyped_storage().resize_(0)
    for take in (summarize, tap.viz.summarize):
        with pytest.raises(CaptureError, match="freed"):
            take(freed)
    assert summarize_tensors([freed]) is None


def test_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    x = values().bfloat16().view(30, 40)[:, ::2]
    want = summarize(x)
    monkeypatch.setattr(module.stats, "code_of", lambda dtype: None)
    monkeypatch.setattr(module.stats, "kernel_code", lambda dtype: None)
    same(summarize(x), want)
