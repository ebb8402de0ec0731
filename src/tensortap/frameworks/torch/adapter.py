"""PyTorch behind the `Framework` protocol."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tensortap.frameworks.protocol import Adapter, Framework, rejecting
from tensortap.frameworks.torch import tensors
from tensortap.frameworks.torch.shards import local_shard
from tensortap.frameworks.torch.summarize import summarize
from tensortap.record import TensorData


class TorchFramework(Framework):
    """PyTorch."""

    name = "torch"

    def adapter(self, cls: type) -> Adapter | None:
        """Return the adapter for a class of tensors."""
        if torch.Tensor not in cls.__mro__:
            return None
        if torch.nn.parameter.UninitializedTensorMixin in cls.__mro__:
            return _UNINITIALIZED
        if cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # type: ignore[attr-defined]
            rejected = rejecting(_WRAPPERS.get(cls.__name__) or _WRAPPER.format(cls.__name__))
            return (
                replace(rejected, local_shard=local_shard)
                if cls.__name__ == "DTensor"
                else rejected
            )
        return _TENSOR if cls in (torch.Tensor, torch.nn.Parameter) else _SUBCLASS

    def rebuild(self, tensor: TensorData) -> Any:
        """Return a tensor on the CPU, in no graph."""
        return tensors.build(tensor)


FRAMEWORK = TorchFramework()

_TENSOR = Adapter(
    tensors.snapshot, tensors.nbytes, tensors.describe, tensors.snapshot_small, summarize,
    tensors.view,
)  # fmt: skip
_SUBCLASS = replace(_TENSOR, snapshot=tensors.snapshot_subclass, snapshot_small=None)
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
