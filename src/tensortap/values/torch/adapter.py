"""PyTorch behind the `Framework` protocol."""

from __future__ import annotations

import contextlib
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import torch
from torch.overrides import has_torch_function

from tensortap.core.errors import CaptureError
from tensortap.core.record import Shard, TensorData
from tensortap.rooms.bisect.grafting import GraftHooks, GraftSource
from tensortap.rooms.bisect.torch.grafts import ModelGrafts
from tensortap.rooms.blackbox.replaying import Training
from tensortap.rooms.blackbox.torch import TorchTraining
from tensortap.rooms.health.torch.trained_models import TrainedModels
from tensortap.rooms.ops.operations import OperationObserver
from tensortap.rooms.ops.torch import OperationHooks
from tensortap.rooms.trace.torch import trace_models
from tensortap.rooms.trace.torch.channel import open_channel, open_store
from tensortap.rooms.trace.torch.stack import stack
from tensortap.rooms.track.observing import (
    Hooks,
    ModelTracing,
    Probe,
    RankChannel,
    RankStore,
    TrackHooks,
    TrackObserver,
    WatchObserver,
)
from tensortap.rooms.track.torch.probes import find_probes
from tensortap.rooms.track.torch.track import ModelHooks
from tensortap.rooms.watch.torch import hooks_on
from tensortap.rooms.widths.torch import TorchWidthTraining
from tensortap.rooms.widths.training import WidthTask, WidthTraining
from tensortap.values.protocol import Adapter, Framework, InPlace, PendingDigest, rejecting
from tensortap.values.torch import private, tensors
from tensortap.values.torch.device_digest import digest_later
from tensortap.values.torch.shards import local_shard
from tensortap.values.torch.summarize import memory_of, summarize


class TorchFramework(Framework):
    """PyTorch."""

    name = "torch"

    def adapter(self, cls: type) -> Adapter | None:
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
        return replace(rejected, copy=tensors.copied_tensor, local_shard=shard)

    def rebuild(self, tensor: TensorData) -> Any:
        return tensors.build(tensor)

    def track(self, model: Any, optimizer: Any, observer: TrackObserver) -> TrackHooks | None:
        if not isinstance(model, torch.nn.Module):
            return None
        return ModelHooks(model, optimizer, observer)

    def catch_gradient(self, value: Any, capture: Callable[[Any], object]) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        if not value.requires_grad:
            raise CaptureError("it requires no gradient, so no backward pass computes one")

        def on_gradient(gradient: torch.Tensor) -> None:
            capture(gradient)

        value.register_hook(torch.utils.hooks.unserializable_hook(on_gradient))
        return value

    def watch(self, target: Any, observer: WatchObserver, title: str) -> Hooks | None:
        return hooks_on(target, observer, title)

    def save(self, value: Any, path: FilePath) -> None:
        torch.save(value, path)

    def load(self, file: FilePath, *, trust: bool, mapped: bool = False) -> Any:
        # only zip archives can be mapped, which is what torch writes since 1.6
        archived = zipfile.is_zipfile(file)
        if archived and not trust:
            with zipfile.ZipFile(file) as archive:
                if any(each.compress_type != zipfile.ZIP_STORED for each in archive.infolist()):
                    raise ValueError("it is compressed, which torch.save does not do")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about files that other versions have written
            options: dict[str, Any] = {"weights_only": not trust, "mmap": mapped and archived}
            return torch.load(file, map_location="cpu", **options)

    def without_graph(self) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = torch.no_grad()
        return context

    def version_of(self, value: Any) -> int:
        return private.version_of(value) if isinstance(value, torch.Tensor) else 0

    def survives_fork(self) -> bool:
        return not torch.cuda.is_initialized()  # its state does not survive

    def after_fork(self) -> None:
        torch.set_num_threads(1)  # a fork does not have the threads of the parent's pool

    def stack(self, name: str, values: list[Any], fill: float) -> Any:
        return stack(name, values, fill)

    def open_channel(self, group: Any) -> RankChannel | None:
        return open_channel(group)

    def operations(self, model: Any, observer: OperationObserver) -> Hooks | None:
        is_program = model is None or isinstance(model, torch.nn.Module)
        return OperationHooks(model, observer) if is_program else None

    def open_store(self) -> Callable[[str], RankStore] | None:
        return open_store()

    def training(self, model: Any, optimizer: Any, others: tuple[Any, ...]) -> Training | None:
        is_module = isinstance(model, torch.nn.Module)
        return TorchTraining(model, optimizer, others) if is_module else None

    def width_training(self, model: Any, optimizer: Any, task: WidthTask) -> WidthTraining | None:
        is_module = isinstance(model, torch.nn.Module)
        return TorchWidthTraining(model, optimizer, task) if is_module else None

    def trained_models(
        self,
        begin: Callable[[Any, Sequence[Any]], Callable[[], None]],
        fault: Callable[[Exception], None],
    ) -> contextlib.AbstractContextManager[Any]:
        return TrainedModels(begin, fault)

    def keeping_random_state(self) -> contextlib.AbstractContextManager[Any]:
        kept: contextlib.AbstractContextManager[Any] = torch.random.fork_rng()
        return kept

    def seed(self, number: int) -> None:
        torch.manual_seed(number)

    def graft(self, model: Any, source: GraftSource) -> GraftHooks | None:
        return ModelGrafts(model, source) if isinstance(model, torch.nn.Module) else None

    def tracing(self) -> ModelTracing | None:
        return trace_models

    def find_probes(
        self, model: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Sequence[Probe] | None:
        return find_probes(model, inputs, named) if isinstance(model, torch.nn.Module) else None


FRAMEWORK = TorchFramework()


def _digest_later(value: torch.Tensor, shard: Shard | None) -> PendingDigest | None:
    if value.is_cpu or value.is_meta or value.is_nested or value.layout is not torch.strided:
        return None
    with private.without_overrides(), torch.no_grad():
        return digest_later(torch.Tensor.as_subclass(value.detach(), torch.Tensor), shard)


_PARAMETER = Adapter(
    tensors.snapshot, tensors.nbytes, tensors.describe, tensors.snapshot_small, summarize,
    tensors.view, copy=tensors.copied_tensor, memory=memory_of,
    in_place=InPlace("torch", tensors.KNOWN, has_torch_function), digest_later=_digest_later,
)  # fmt: skip
_TENSOR = replace(_PARAMETER, keyed_copy=tensors.keyed_copy, compact=tensors.CompactTensor)
_SUBCLASS = replace(
    _PARAMETER, snapshot=tensors.snapshot_subclass, snapshot_small=None, memory=None, in_place=None
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
