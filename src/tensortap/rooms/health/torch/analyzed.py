"""Hooks that tell analyses what happens in the steps of a torch model."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tensortap.core.record import Kind
from tensortap.rooms.health.analyzing import (
    ModelFacts,
    StepListener,
    TrainedParameter,
    TrainedParameters,
)
from tensortap.rooms.health.torch.host import MOST_COPIED, host_view, is_here
from tensortap.rooms.health.torch.layers import LayerHooks
from tensortap.rooms.track.observing import TrackObserver, tensors_in
from tensortap.rooms.track.torch.descriptions import observed
from tensortap.rooms.track.torch.meshes import is_sharded
from tensortap.rooms.track.torch.names import Names
from tensortap.rooms.track.torch.optimizers import parameters_of
from tensortap.rooms.track.torch.track import TrackedModule
from tensortap.values.torch import private
from tensortap.values.torch.hidden import hide_from_compiler
from tensortap.values.torch.shards import local_part
from tensortap.values.torch.tensors import has_values

_UNREADABLE = "sparse gradients, and what is captured into a CUDA graph, are not analyzed"
_TOO_LARGE = (
    "parameters and gradients on a device take {:,} MiB, more than the {:,} MiB that are copied to "
    "be analyzed: include= selects some of them"
)
_SHARDED = "gradients of fully_shard are averaged before anybody sees them"
_NO_OPTIMIZER = "no updates: pass the optimizer, tap.track(model, optimizer=...)"


def _guarded(look: Callable[..., None]) -> Callable[..., None]:
    """Return a method that looks only in observed steps, and never raises."""

    @functools.wraps(look)
    def call(self: AnalysisHooks, *args: Any) -> None:
        if self._observer.capturing:
            try:
                look(self, *args)
            except Exception as error:
                self._observer.fault("analyses", error)

    return call


class AnalysisHooks:
    """Hooks for analyses, on outputs, parameters and optimizers, as far as somebody listens."""

    def __init__(
        self,
        tracked: TrackedModule,
        observer: TrackObserver,
        listener: StepListener,
    ) -> None:
        self._root = root = tracked.root
        self._optimizers = [each.optimizer for each in tracked.optimizers if not each.wraps]
        self._named = functools.partial(tracked.parameters, True)
        self._observer = observer
        self._listener = listener
        self._undo: list[Callable[[], object]] = []
        self._replicas = 1
        self._layers = LayerHooks(root, observer, self._listener)
        self._is_sharded = False
        self._passes: set[int] = set()  # backward passes of this step

    def attach(self) -> None:
        modules = list(Names(self._root).modules())
        self._replicas = _replicas(self._root)
        self._is_sharded = is_sharded(self._root)
        if self._is_sharded and self._listener.wants("gradient"):
            self._observer.unseen["noise"] = _SHARDED
        self._listener.attach(ModelFacts(self._root, modules[0][0], self._replicas))
        self._layers.attach(modules)
        if self._listener.wants("gradient") or self._listener.wants("after_backward"):
            for name, parameter in self._named().items():
                if parameter.requires_grad and has_values(parameter):
                    look = functools.partial(self._on_gradient, name, weakref.ref(parameter))
                    hide_from_compiler(look)
                    self._undo.append(parameter.register_hook(look).remove)
            if self._is_sharded:  # hooks on its parameters are never called
                begin = functools.partial(self._on_root_output)
                hide_from_compiler(begin)
                self._undo.append(self._root.register_forward_hook(begin).remove)
        if self._listener.wants("before_update") or self._listener.wants("after_update"):
            if not self._optimizers:
                self._observer.unseen["analyses"] = _NO_OPTIMIZER
            for optimizer in self._optimizers:
                before = functools.partial(self._on_update, False)
                after = functools.partial(self._on_update, True)
                self._undo.append(optimizer.register_step_pre_hook(before).remove)
                self._undo.append(optimizer.register_step_post_hook(after).remove)

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._layers.detach()
        self._listener.detach()

    def end_step(self) -> None:
        self._layers.end_step()
        self._passes.clear()
        if self._observer.capturing:
            self._listener.end_step()

    def _wants(self, name: str) -> bool:
        return self._observer.wants(Kind.HEALTH, name)

    @_guarded
    def _on_gradient(
        self, name: str, of: Callable[[], torch.Tensor | None], gradient: torch.Tensor
    ) -> None:
        # in a sharded model, this is a parameter that FSDP does not average
        if self._wants(name) and self._listener.wants("gradient") and not self._is_sharded:
            parameter = of()
            if parameter is not None and parameter.grad is None and self._replicas == 1:
                self._listener.gradient(name, None)
            elif (array := self._array(gradient.detach())) is not None:
                self._listener.gradient(name, array)
        self._note_pass(gradient)

    @_guarded
    def _on_root_output(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        for _, tensor in tensors_in(output, torch.Tensor):
            if tensor.requires_grad:
                tensor.register_hook(self._note_pass)

    @_guarded
    def _note_pass(self, gradient: torch.Tensor) -> None:
        """Look at all gradients at the end of this backward pass."""
        this_pass = private.backward_pass()
        if this_pass not in self._passes and self._listener.wants("after_backward"):
            self._passes.add(this_pass)
            private.after_backward(self._after_backward)

    @_guarded
    def _after_backward(self) -> None:
        found = TrainedParameters(self._trained(self._named().items()))
        self._listener.after_backward(found)

    @_guarded
    def _on_update(self, after: bool, optimizer: Any, args: Any, kwargs: Any) -> None:
        names = {id(parameter): name for name, parameter in self._named().items()}
        named = (
            (names[id(parameter)], parameter)
            for parameter in parameters_of(optimizer)
            if id(parameter) in names
        )
        # before the step, a closure has not computed the gradients yet
        closure = any(callable(argument) for argument in (*args[1:], *kwargs.values()))
        found = TrainedParameters(self._trained(named, after or not closure))
        (self._listener.after_update if after else self._listener.before_update)(found)

    def _trained(
        self, named: Iterable[tuple[str, torch.nn.Parameter]], gradients: bool = True
    ) -> Iterator[TrainedParameter]:
        wanted = [(name, parameter) for name, parameter in named if self._wants(name)]
        if self._is_too_large([parameter for _, parameter in wanted]):
            return
        for name, parameter in wanted:
            seen, local = observed(name, Kind.WEIGHT, parameter)
            value, gradient = self._array(local), None
            if value is None:
                continue
            if gradients and parameter.grad is not None:
                gradient = self._array(observed(name, Kind.WEIGHT_GRADIENT, parameter.grad)[1])
            placements = seen.tags.get("placements", "")
            yield TrainedParameter(name, value, gradient, placements)

    def _is_too_large(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Return whether the parameters on devices exceed the limit, so that none is copied."""
        away = [local for each in parameters if not is_here(local := local_part(each))]
        nbytes: int = 2 * sum(each.nbytes for each in away)  # with gradients
        if nbytes > MOST_COPIED:
            reason = _TOO_LARGE.format(nbytes >> 20, MOST_COPIED >> 20)
            self._observer.unseen["analyses"] = reason
        return nbytes > MOST_COPIED

    def _array(self, tensor: torch.Tensor) -> Any:
        """Return a tensor as an array; None if the host cannot read it."""
        array = host_view(tensor)
        if array is None:
            self._observer.unseen["analyses"] = _UNREADABLE
        return array


def _replicas(root: torch.nn.Module) -> int:
    """Return how many ranks average their gradients."""
    if torch.distributed.is_available() and isinstance(
        root, torch.nn.parallel.DistributedDataParallel
    ):
        return int(torch.distributed.get_world_size(root.process_group))
    return 1
