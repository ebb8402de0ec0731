"""Hooks that show analyses what the modules of a torch model compute."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tensortap.core.record import Kind
from tensortap.rooms.health.analyzing import ModuleOutput, OutputArray, StepListener
from tensortap.rooms.health.torch.attention import (
    COMPILED,
    MULTIHEAD,
    UNREADABLE,
    AttentionPasses,
    logits_of,
)
from tensortap.rooms.health.torch.host import host_view
from tensortap.rooms.track.observing import TrackObserver, tensors_in
from tensortap.rooms.track.torch.graph_outputs import insert
from tensortap.rooms.track.torch.hooks import GraphTensors, ModuleHook, hook_module
from tensortap.rooms.track.torch.outputs import OBSERVED, mode_tags
from tensortap.values.torch import graphs, private
from tensortap.values.torch.tensors import quiet

_UNREADABLE = "outputs that the host cannot read, as in a captured CUDA graph, are not analyzed"
_CHANNELS_FIRST = ("Conv1d", "ConvTranspose1d", "BatchNorm1d", "InstanceNorm1d", "SyncBatchNorm")


class LayerHooks:
    """Hooks on the outputs of modules, and on the attention that they compute."""

    def __init__(
        self, root: torch.nn.Module, observer: TrackObserver, listener: StepListener
    ) -> None:
        self._root = root
        self._observer = observer
        self._listener = listener
        self._undo: list[Callable[[], object]] = []
        self._calls: dict[str, int] = {}
        # the last output, its version and its name: a container returns that of its last module
        self._last: tuple[Any, int, str] | None = None
        self._running: dict[int, list[str]] = {}  # by thread; the innermost is the last
        self._attention: AttentionPasses | None = None

    def attach(self, modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
        """Hook into the modules that are selected."""
        wanted = [pair for pair in modules if self._observer.wants(Kind.HEALTH, pair[0])]
        if self._listener.wants("attention"):
            self._attach_attention(wanted)
        if not self._listener.wants("output"):
            return
        graphs.forget_graphs(OBSERVED, begins=True)
        self._undo.append(functools.partial(graphs.forget_graphs, OBSERVED, begins=False))
        for name, module in wanted:
            probe = graphs.probe(functools.partial(self._on_graph, name, module))
            self._undo.append(functools.partial(graphs.drop, probe))
            end = ModuleHook(functools.partial(self._on_output, name), insert, GraphTensors(probe))
            self._undo.append(hook_module(module, end, with_kwargs=True))

    def _attach_attention(self, wanted: Iterable[tuple[str, torch.nn.Module]]) -> None:
        # in an evaluation it computes in another way while a mode is active, with other last bits
        if any(isinstance(each, torch.nn.MultiheadAttention) for each in self._root.modules()):
            self._observer.unseen["attention"] = MULTIHEAD
            return
        self._attention = AttentionPasses(self._on_attention, self._is_observed)
        self._undo += self._attention.attach(self._root)
        for name, module in wanted:
            begin = ModuleHook(functools.partial(self._on_begin, name))
            self._undo.append(hook_module(module, begin, before=True))

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()

    def end_step(self) -> None:
        self._calls.clear()
        self._running.clear()
        self._last = None
        if self._attention is not None and self._attention.is_compiled:
            self._observer.unseen["attention"] = COMPILED

    def _is_observed(self) -> bool:
        """Return whether a forward pass that is running now is one to look at."""
        observer = self._observer
        if not observer.capturing or private.backward_pass() != -1:  # a checkpoint recomputes it
            return False
        return not (observer.only_training and mode_tags(self._root.training))

    def _on_begin(self, name: str, *_: Any) -> None:
        """Note that a module is called, unless it is in a graph."""
        if self._observer.capturing and private.backward_pass() == -1:
            self._running.setdefault(threading.get_ident(), []).append(name)

    def _on_end(self, name: str) -> None:
        """Forget a call, and those in it that have raised an error."""
        running = self._running.get(threading.get_ident(), [])
        if name in running:
            while running.pop() != name:
                pass

    def _on_attention(self, given: dict[str, Any]) -> None:
        running = self._running.get(threading.get_ident())
        if not running or not self._is_observed():
            return
        try:
            with quiet():
                found = logits_of(given)
            if found is None:
                self._observer.unseen.setdefault("attention", UNREADABLE)
            else:
                self._listener.attention(running[-1], found)
        except Exception as error:
            self._observer.fault("attention", error)

    def _on_output(
        self, name: str, module: torch.nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        self._on_end(name)
        if self._is_observed():
            self._take(name, module, tensors_in(output, torch.Tensor))

    def _on_graph(
        self, name: str, module: torch.nn.Module, values: list[torch.Tensor], note: str
    ) -> None:
        """Take outputs from a compiled graph; see `graph_outputs`."""
        grad, *paths = note.split("\n")
        with torch.set_grad_enabled(bool(grad)):
            if self._is_observed():
                self._take(name, module, zip(paths, values, strict=True))
                if self._attention is not None:
                    self._attention.is_compiled = True

    def _take(
        self, name: str, module: torch.nn.Module, found: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        try:
            call = self._calls[name] = self._calls.get(name, -1) + 1
            with quiet():
                arrays = tuple(self._arrays(name, module, found))
                self._listener.output(ModuleOutput(name, module, call, arrays))
        except Exception as error:
            self._observer.fault(name, error)

    def _arrays(
        self, name: str, module: torch.nn.Module, found: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[OutputArray]:
        for path, tensor in found:
            if hasattr(tensor, "wait"):  # a collective that the program overlaps with work
                continue
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            array = None if hasattr(local, "wait") else host_view(local.detach())
            if array is None:
                self._observer.unseen.setdefault(name, _UNREADABLE)
                continue
            version, same_as, last = private.version_of(tensor), "", self._last
            if last is not None and last[0]() is tensor and last[1] == version:
                same_as = last[2]
            self._last = weakref.ref(tensor), version, name + path
            yield OutputArray(name + path, array, _channel_axis(module, array.ndim), same_as)


def _channel_axis(module: torch.nn.Module, dimensions: int) -> int:
    """Return which dimension of an output has the channels.

    >>> _channel_axis(torch.nn.Linear(2, 2), 3), _channel_axis(torch.nn.Conv2d(2, 2, 1), 4)
    (-1, 1)
    """
    first = dimensions == 3 and type(module).__name__ in _CHANNELS_FIRST
    return 1 if first or dimensions >= 4 else -1
