"""PyTorch behind the `Framework` protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import has_torch_function

from tensortap.core.errors import CaptureError
from tensortap.core.record import TensorData
from tensortap.values.protocol import Adapter, Framework, InPlace, rejecting
from tensortap.values.torch import tensors
from tensortap.values.torch.shards import local_shard
from tensortap.values.torch.summarize import memory_of, summarize


class TorchFramework(Framework):
    name = "torch"

    def adapter(self, cls: type) -> Adapter | None:
        if torch.Tensor not in cls.__mro__:
            return None
        if cls in (torch.Tensor, torch.nn.Parameter):
            return _TENSOR
        if torch.nn.parameter.UninitializedTensorMixin in cls.__mro__:
            return _UNINITIALIZED
        if cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:  # type: ignore[attr-defined]
            return _SUBCLASS
        rejected = rejecting(_WRAPPERS.get(cls.__name__) or _WRAPPER.format(cls.__name__))
        shard = local_shard if cls.__name__ == "DTensor" else None
        return replace(rejected, copy=tensors.copied_tensor, local_shard=shard)

    def rebuild(self, tensor: TensorData) -> Any:
        return tensors.build(tensor)

    def catch_gradient(self, value: Any, capture: Callable[[Any], object]) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        if not value.requires_grad:
            raise CaptureError("it requires no gradient, so no backward pass computes one")

        def on_gradient(gradient: torch.Tensor) -> None:
            capture(gradient)

        value.register_hook(torch.utils.hooks.unserializable_hook(on_gradient))
        return value


FRAMEWORK = TorchFramework()


_TENSOR = Adapter(
    tensors.snapshot, tensors.nbytes, tensors.describe, tensors.snapshot_small, summarize,
    tensors.view, copy=tensors.copied_tensor, memory=memory_of,
    in_place=InPlace("torch", tensors.KNOWN, has_torch_function),
)  # fmt: skip
_SUBCLASS = replace(
    _TENSOR, snapshot=tensors.snapshot_subclass, snapshot_small=None, memory=None, in_place=None
)
_UNINITIALIZED = rejecting(
    "an uninitialized parameter has no data: catch it after the first forward"
)
_WRAPPER = "a {} only wraps other tensors: catch the tensors inside it"
_WRAPPERS = {
    "FakeTensor": "a fake tensor has a shape but no data: catch the real one at run time",
    "DTensor": "a DTensor is spread over ranks: catch it by itself, or tensor.full_tensor()",
    "NestedTensor": "a nested tensor has no single shape: catch tensor.values(), or unbind()",
    "AsyncCollectiveTensor": "a collective is still running: catch tensor.wait()",
}
