"""Torch in `watch`: hooks on modules, parameters and tensors."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch

from tensortap.core.record import Kind
from tensortap.rooms.track.observing import Hooks
from tensortap.rooms.track.torch.descriptions import observed
from tensortap.rooms.track.torch.outputs import ModuleCall, OutputHooks
from tensortap.rooms.watch.watch_observer import TargetObserver
from tensortap.values.torch import private


def without_graph() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which operations are not recorded for gradients."""
    context: contextlib.AbstractContextManager[Any] = torch.no_grad()
    return context


def version_of(value: Any) -> int:
    """Return a number that grows when a tensor is changed in place; 0 for other values."""
    return private.version_of(value) if isinstance(value, torch.Tensor) else 0


def survives_fork() -> bool:
    """Return whether a fork of this process can use torch: the state of CUDA does not survive."""
    return not torch.cuda.is_initialized()


def after_fork() -> None:
    """Make torch usable in a fork, which does not have the threads of the parent's pool."""
    torch.set_num_threads(1)


def hooks_on(target: Any, observer: TargetObserver, title: str) -> Hooks | None:
    """Return hooks for a module, parameter or tensor; None for anything else."""
    if isinstance(target, torch.nn.Module):
        return WatchedModule(target, observer, title)
    if isinstance(target, torch.Tensor):
        is_parameter = isinstance(target, torch.nn.Parameter)
        return WatchedTensor(target, observer, title or ("parameter" if is_parameter else "tensor"))
    return None


class WatchedModule(OutputHooks):
    """Hooks on a module and all modules in it, captured as often as the rate allows."""

    def __init__(self, root: torch.nn.Module, observer: TargetObserver, title: str) -> None:
        super().__init__(root, observer, title)
        self._watch = observer

    def _count(
        self,
        wanted: ModuleCall,
        name: str,
        again: bool,
        grad: bool,
        replica: bool = False,
        output: Any = None,
    ) -> ModuleCall | None:
        watch = self._watch
        step, call = watch.place(name, again)
        # outputs that a checkpoint recomputes were captured before, but gradients come from here
        activation = wanted.activation and not again and watch.due(name, Kind.ACTIVATION)
        gradient = wanted.gradient and grad and watch.due(name, Kind.GRADIENT)
        return ModuleCall(step, call, activation, gradient) if activation or gradient else None


class WatchedTensor:
    """A hook on a tensor: its gradient whenever one is computed, and its value with it."""

    def __init__(self, tensor: torch.Tensor, observer: TargetObserver, title: str) -> None:
        if not tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter):
            raise TypeError(
                f"{title!r} requires no gradient, so no hook would ever run: capture its value "
                "with watcher.catch(tensor, name)"
            )
        self._tensor = weakref.ref(tensor)
        self._observer = observer
        self._title = title
        self._handle: Any = None

    def attach(self) -> None:
        """Install the hook; capture a frozen parameter once."""
        tensor = self._tensor()
        if tensor is None:
            return
        if not isinstance(tensor, torch.nn.Parameter):
            self._handle = tensor.register_hook(self._on_gradient)
        elif tensor.requires_grad:
            self._handle = tensor.register_post_accumulate_grad_hook(self._on_parameter)
        else:
            self._on_parameter(tensor)

    def detach(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _on_parameter(self, parameter: torch.nn.Parameter) -> None:
        kinds = self._observer.kinds
        values = {Kind.WEIGHT: parameter, Kind.WEIGHT_GRADIENT: parameter.grad}
        self._observe({kind: tensor for kind, tensor in values.items() if kind in kinds})

    def _on_gradient(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        kinds = self._observer.kinds
        value = self._tensor() if {Kind.ACTIVATION, Kind.GRADIENT} <= set(kinds) else None
        self._observe({Kind.VALUE: value, Kind.GRADIENT: gradient})

    def _observe(self, tensors: dict[Kind, torch.Tensor | None]) -> None:
        observer, name = self._observer, self._title
        if not observer.capturing:
            return
        try:
            step, call = observer.place(name)
            for kind, tensor in tensors.items():
                if tensor is not None and observer.due(name, kind):
                    observer.observe(*observed(name, kind, tensor, call), step)
        except Exception as error:
            observer.fault(name, error)
