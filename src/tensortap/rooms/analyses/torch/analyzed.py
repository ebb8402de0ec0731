"""Hooks that tell analyses what happens in the steps of a torch model."""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tensortap.core.record import Kind
from tensortap.rooms.analyses.analysis import (
    Analyses,
    ModuleOutput,
    OutputArray,
    TrainedParameter,
    TrainedParameters,
)
from tensortap.rooms.analyses.torch import attention
from tensortap.rooms.track.observer import Observer
from tensortap.rooms.track.observing import tensors_in
from tensortap.rooms.track.torch.descriptions import observed
from tensortap.rooms.track.torch.graph_outputs import insert
from tensortap.rooms.track.torch.hooks import GraphTensors, ModuleHook, hook_module
from tensortap.rooms.track.torch.internals import forget_graphs
from tensortap.rooms.track.torch.layouts import is_sharded, local_part
from tensortap.rooms.track.torch.names import Names
from tensortap.rooms.track.torch.optimizers import hook_step, parameters_of
from tensortap.rooms.track.torch.outputs import OBSERVED, mode_tags
from tensortap.rooms.track.torch.reading import MOST_COPIED, host_view, is_here
from tensortap.rooms.track.torch.track import TrackedModule
from tensortap.values.torch import graphs, private
from tensortap.values.torch.hidden import hide_from_compiler
from tensortap.values.torch.tensors import has_values, quiet

_UNREADABLE = (
    "sparse, nested and quantized tensors, and what is captured into a CUDA graph, are not analyzed"
)
_TOO_LARGE = (
    "parameters and gradients on a device take {:,} MiB, more than the {:,} MiB that are copied to "
    "be analyzed: include= selects some of them"
)
_SHARDED = "gradients of fully_shard are averaged before anybody sees them"
_NO_OPTIMIZER = "no updates: pass the optimizer, tap.track(model, optimizer=...)"
_CHANNELS_FIRST = ("Conv1d", "ConvTranspose1d", "BatchNorm1d", "InstanceNorm1d", "SyncBatchNorm")


class AnalysisHooks:
    """Hooks for analyses, on modules, parameters and optimizers, as far as somebody listens."""

    def __init__(self, tracked: TrackedModule, observer: Observer, analyses: Analyses) -> None:
        self._root, self._observer, self._analyses = tracked.root, observer, analyses
        self._optimizers = [each.optimizer for each in tracked.optimizers if not each.wraps]
        self._named = functools.partial(tracked.parameters, True)
        self._undo: list[Callable[[], object]] = []
        self._replicas = _replicas(tracked.root)
        self._is_sharded = self._is_split = False
        self._passes: set[int] = set()  # backward passes of this step
        self._calls: dict[str, int] = {}
        # the last output, its version and its name: a container returns that of its last module
        self._last: tuple[Any, int, str] | None = None
        self._running: dict[int, list[str]] = {}  # by thread; the innermost is the last
        self._attention: attention.AttentionPasses | None = None

    def attach(self) -> None:
        wants = self._analyses.wants
        modules = list(Names(self._root).modules())
        self._analyses.attach(self._root, modules[0][0], self._replicas)
        self._is_sharded = is_sharded(self._root)
        self._is_split = any(hasattr(each, "device_mesh") for each in self._root.parameters())
        if self._is_sharded and wants("gradient"):
            self._observer.unseen["noise"] = _SHARDED
        chosen = [(name, module) for name, module in modules if self._wants(name)]
        if wants("attention"):
            self._attach_attention(chosen)
        if wants("output"):
            self._attach_outputs(chosen)
        if wants("gradient", "after_backward"):
            self._attach_gradients()
        if wants("before_update", "after_update"):
            if not self._optimizers:
                self._observer.unseen["analyses"] = _NO_OPTIMIZER
            missed = functools.partial(self._observer.unseen.__setitem__, "optimizer")
            for optimizer in self._optimizers:
                before, after = (self._guarded(self._on_update, late) for late in (False, True))
                self._undo += hook_step(optimizer, before, after, missed)

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._analyses.detach()

    def end_step(self) -> None:
        self._calls.clear()
        self._running.clear()
        self._passes.clear()
        self._last = None
        if self._attention is not None and self._attention.is_compiled:
            self._observer.unseen["attention"] = attention.COMPILED
        if self._observer.capturing:
            self._analyses.end_step()

    def _wants(self, name: str) -> bool:
        return self._observer.wants(Kind.HEALTH, name)

    def _guarded(self, look: Callable[..., None], *args: Any) -> Callable[..., None]:
        """Return a hook that looks only in observed steps, and never raises."""

        def call(*given: Any, **kwargs: Any) -> None:
            if self._observer.capturing:
                try:
                    look(*args, *given, **kwargs)
                except Exception as error:
                    self._observer.fault("analyses", error)

        hide_from_compiler(call)
        return call

    # -- outputs ---------------------------------------------------------------------------

    def _attach_outputs(self, chosen: Iterable[tuple[str, torch.nn.Module]]) -> None:
        forget = functools.partial(forget_graphs, OBSERVED, self._root)
        forget(begins=True)
        self._undo.append(functools.partial(forget, begins=False))
        for name, module in chosen:
            probe = graphs.probe(self._guarded(self._on_graph, name, module))
            self._undo.append(functools.partial(graphs.drop, probe))
            look = functools.partial(self._on_output, name)
            end = ModuleHook(look, insert, GraphTensors(probe))
            self._undo.append(hook_module(module, end, with_kwargs=True))

    def _is_observed(self) -> bool:
        """Return whether a forward pass that is running now is one to look at."""
        observer = self._observer
        if not observer.capturing or private.backward_pass() != -1:  # a checkpoint recomputes it
            return False
        return not (observer.only_training and mode_tags(self._root.training))

    def _on_output(
        self, name: str, module: torch.nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        running = self._running.get(threading.get_ident(), [])
        if name in running:
            while running.pop() != name:
                pass  # calls in it that have raised an error
        if self._is_observed():
            try:
                self._take(name, module, tensors_in(output, torch.Tensor))
            except Exception as error:
                self._observer.fault(name, error)

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
        call = self._calls[name] = self._calls.get(name, -1) + 1
        with quiet():
            arrays = tuple(self._arrays(name, module, found))
            self._analyses.tell("output", ModuleOutput(name, module, call, arrays))

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

    # -- attention -------------------------------------------------------------------------

    def _attach_attention(self, chosen: Iterable[tuple[str, torch.nn.Module]]) -> None:
        # in an evaluation it computes in another way while a mode is active, with other last bits
        if any(isinstance(each, torch.nn.MultiheadAttention) for each in self._root.modules()):
            self._observer.unseen["attention"] = attention.MULTIHEAD
            return
        take = self._guarded(self._on_attention)
        self._attention = attention.AttentionPasses(take, self._is_observed)
        self._undo += self._attention.attach(self._root)
        for name, module in chosen:
            begin = ModuleHook(functools.partial(self._on_begin, name))
            self._undo.append(hook_module(module, begin, before=True))

    def _on_begin(self, name: str, *_: Any) -> None:
        """Note that a module is called, unless it is in a graph."""
        if self._observer.capturing and private.backward_pass() == -1:
            self._running.setdefault(threading.get_ident(), []).append(name)

    def _on_attention(self, given: dict[str, Any]) -> None:
        running = self._running.get(threading.get_ident())
        if running and self._is_observed():
            with quiet():
                found = attention.logits_of(given)
            if found is None:
                self._observer.unseen.setdefault("attention", attention.UNREADABLE)
            else:
                self._analyses.tell("attention", running[-1], found)

    # -- parameters ------------------------------------------------------------------------

    def _attach_gradients(self) -> None:
        for name, parameter in self._named().items():
            if parameter.requires_grad and has_values(parameter):
                look = self._guarded(self._on_gradient, name, weakref.ref(parameter))
                self._undo.append(parameter.register_hook(look).remove)
        if self._is_sharded:  # hooks on its parameters are never called
            begin = self._guarded(self._on_root_output)
            self._undo.append(self._root.register_forward_hook(begin).remove)

    def _on_gradient(
        self, name: str, of: Callable[[], torch.Tensor | None], gradient: torch.Tensor
    ) -> None:
        # in a sharded model, this is a parameter that FSDP does not average
        if self._wants(name) and self._analyses.wants("gradient") and not self._is_sharded:
            parameter = of()
            if parameter is not None and parameter.grad is None and self._replicas == 1:
                self._analyses.tell("gradient", name, None)
            elif (array := self._array(gradient.detach())) is not None:
                self._analyses.tell("gradient", name, array)
        self._note_pass()

    def _on_root_output(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        note = self._guarded(lambda gradient: self._note_pass())
        for _, tensor in tensors_in(output, torch.Tensor):
            if tensor.requires_grad:
                tensor.register_hook(note)

    def _note_pass(self) -> None:
        """Look at all gradients at the end of this backward pass."""
        this_pass = private.backward_pass()
        if this_pass not in self._passes and self._analyses.wants("after_backward"):
            self._passes.add(this_pass)
            private.after_backward(self._guarded(self._after_backward))

    def _after_backward(self) -> None:
        found = TrainedParameters(self._trained(self._named().items()))
        self._analyses.tell("after_backward", found)

    def _on_update(self, late: bool, optimizer: Any, args: Any, kwargs: Any) -> None:
        names = {id(parameter): name for name, parameter in self._named().items()}
        named = (
            (names[id(parameter)], parameter)
            for parameter in parameters_of(optimizer)
            if id(parameter) in names
        )
        # before the step, a closure has not computed the gradients yet
        closure = any(callable(argument) for argument in (*args[1:], *kwargs.values()))
        found = TrainedParameters(self._trained(named, late or not closure))
        self._analyses.tell("after_update" if late else "before_update", found)

    def _trained(
        self, named: Iterable[tuple[str, torch.nn.Parameter]], gradients: bool = True
    ) -> Iterator[TrainedParameter]:
        wanted = [(name, parameter) for name, parameter in named if self._wants(name)]
        away = [local for _, each in wanted if not is_here(local := local_part(each))]
        nbytes = 2 * sum(each.nbytes for each in away)  # with gradients
        if nbytes > MOST_COPIED:  # then none of them is copied
            reason = _TOO_LARGE.format(nbytes >> 20, MOST_COPIED >> 20)
            self._observer.unseen["analyses"] = reason
            return
        for name, parameter in wanted:
            seen, local = observed(name, Kind.WEIGHT, parameter)
            value, gradient = self._array(local), None
            if value is None:
                continue
            if gradients and parameter.grad is not None:
                gradient = self._array(observed(name, Kind.WEIGHT_GRADIENT, parameter.grad)[1])
            copies = _copies(parameter) if self._is_split else 1
            placements = seen.tags.get("placements", "")
            yield TrainedParameter(name, value, gradient, placements, copies)

    def _array(self, tensor: torch.Tensor) -> Any:
        """Return a tensor as an array; None if the host cannot read it."""
        array = host_view(tensor)
        if array is None:
            self._observer.unseen["analyses"] = _UNREADABLE
        return array


def _channel_axis(module: torch.nn.Module, dimensions: int) -> int:
    """Return which dimension of an output has the channels."""
    first = dimensions == 3 and type(module).__name__ in _CHANNELS_FIRST
    return 1 if first or dimensions >= 4 else -1


def _copies(parameter: Any) -> int:
    """Return how many ranks have the same part of a parameter."""
    mesh = getattr(parameter, "device_mesh", None)
    sizes = () if mesh is None else zip(mesh.shape, parameter.placements, strict=True)
    parts: int = math.prod(size for size, each in sizes if not each.is_replicate())
    return max(1, int(torch.distributed.get_world_size()) // parts)


def _replicas(root: torch.nn.Module) -> int:
    """Return how many ranks average their gradients."""
    if torch.distributed.is_available() and isinstance(
        root, torch.nn.parallel.DistributedDataParallel
    ):
        return int(torch.distributed.get_world_size(root.process_group))
    return 1
