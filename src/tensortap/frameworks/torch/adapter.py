"""PyTorch behind the `Framework` protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any, BinaryIO

import torch

from tensortap.frameworks.observing import (
    Hooks,
    ModelTracing,
    Probe,
    RankChannel,
    TrackHooks,
    TrackObserver,
    WatchObserver,
)
from tensortap.frameworks.protocol import Adapter, Framework, rejecting
from tensortap.frameworks.torch import private, tensors
from tensortap.frameworks.torch.copies import CompactTensor, copied_tensor, keyed_copy
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
        if cls is torch.Tensor:
            return _TENSOR
        if cls is torch.nn.Parameter:
            return _PARAMETER
        if torch.nn.parameter.UninitializedTensorMixin in cls.__mro__:
            return _UNINITIALIZED
        if cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:  # type: ignore[attr-defined]
            return _SUBCLASS
        rejected = rejecting(_WRAPPERS.get(cls.__name__) or _WRAPPER.format(cls.__name__))
        shard = local_shard if cls.__name__ == "DTensor" else None
        return replace(rejected, copy=copied_tensor, local_shard=shard)

    def rebuild(self, tensor: TensorData) -> Any:
        """Return a tensor on the CPU, in no graph."""
        return tensors.build(tensor)

    def track(self, model: Any, optimizer: Any, observer: TrackObserver) -> TrackHooks | None:
        """Return hooks on a module and its optimizers."""
        from tensortap.frameworks.torch.track import ModelHooks

        is_module = isinstance(model, torch.nn.Module)
        return ModelHooks(model, optimizer, observer) if is_module else None

    def watch(self, target: Any, observer: WatchObserver, title: str) -> Hooks | None:
        """Return hooks on a module, parameter or tensor."""
        from tensortap.frameworks.torch.watch import hooks_on

        return hooks_on(target, observer, title)

    def save(self, value: Any, path: FilePath) -> None:
        """Write a ``.pt`` file."""
        from tensortap.frameworks.torch.files import save

        save(value, path)

    def load(self, file: FilePath | BinaryIO, *, trust: bool, mapped: bool = False) -> Any:
        """Read a ``.pt`` file; tensors are on the CPU."""
        from tensortap.frameworks.torch.files import load

        return load(file, trust, mapped)

    def reduction(self, value: Any) -> tuple[Any, tuple[Any, ...]] | None:
        """Embed a tensor in a pickle as `torch.save` writes it."""
        from tensortap.frameworks.torch.files import reduction

        return reduction(value)

    def without_graph(self) -> contextlib.AbstractContextManager[Any]:
        """Return `torch.no_grad()`."""
        context: contextlib.AbstractContextManager[Any] = torch.no_grad()
        return context

    def version_of(self, value: Any) -> int:
        """Return how often a tensor was changed in place."""
        return private.version_of(value) if isinstance(value, torch.Tensor) else 0

    def survives_fork(self) -> bool:
        """Return whether CUDA is unused: its state does not survive a fork."""
        return not torch.cuda.is_initialized()

    def after_fork(self) -> None:
        """Use one thread: a fork does not have the threads of the parent's pool."""
        torch.set_num_threads(1)

    def stack(self, name: str, values: list[Any], fill: float) -> Any:
        """Return tensors or numbers as one tensor."""
        from tensortap.frameworks.torch.stack import stack

        return stack(name, values, fill)

    def open_channel(self, group: Any) -> RankChannel | None:
        """Connect the ranks of a process group of torch.distributed."""
        from tensortap.frameworks.torch.channel import open_channel

        return open_channel(group)

    def tracing(self) -> ModelTracing | None:
        """Return the knowledge about modules that `trace` needs."""
        from tensortap.frameworks.torch import trace_models

        return trace_models

    def find_probes(
        self, model: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Sequence[Probe] | None:
        """Run a module forward and backward, and return its modules and parameters."""
        from tensortap.frameworks.torch.probes import find_probes

        return find_probes(model, inputs, named) if isinstance(model, torch.nn.Module) else None


FRAMEWORK = TorchFramework()

_PARAMETER = Adapter(
    tensors.snapshot, tensors.nbytes, tensors.describe, tensors.snapshot_small, summarize,
    tensors.view, copy=copied_tensor,
)  # fmt: skip
_TENSOR = replace(_PARAMETER, keyed_copy=keyed_copy, compact=CompactTensor)
_SUBCLASS = replace(_PARAMETER, snapshot=tensors.snapshot_subclass, snapshot_small=None)
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
