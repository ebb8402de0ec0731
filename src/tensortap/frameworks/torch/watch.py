"""What of torch can be watched: modules with all that is in them, parameters and tensors."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from tensortap.frameworks.torch.outputs import Outputs, Turn
from tensortap.frameworks.torch.seen import seen_of
from tensortap.pipeline.pipeline import pipeline
from tensortap.record import Kind
from tensortap.sources.outputs import leaves
from tensortap.sources.watching import Watching


class WatchedModule(Outputs):
    """The outputs of a module and of all modules in it, and their gradients, as often as is due."""

    def __init__(self, root: torch.nn.Module, watching: Watching, title: str) -> None:
        super().__init__(root, watching, title)
        self._watching = watching
        self._held: dict[str, Any] = {}
        self._devices: dict[str, torch.device] = {}

    def _turn(
        self, wanted: Turn, name: str, again: bool, module: torch.nn.Module, output: Any
    ) -> Turn | None:
        watching = self._watching
        step, call = watching.place(name, again)
        if getattr(module, "_is_replica", False) and not self._is_first(name, output):
            return None
        # what a checkpoint computes again was seen before; where it is, gradients come from there
        activation = wanted.activation and not again and watching.due(name, Kind.ACTIVATION)
        gradient = wanted.gradient and torch.is_grad_enabled() and watching.due(name, Kind.GRADIENT)
        return Turn(step, call, activation, gradient) if activation or gradient else None

    def _is_first(self, name: str, output: Any) -> bool:
        """Whether a replica of DataParallel is the one that is watched: one device, not all."""
        for _, tensor in leaves(output, torch.Tensor):
            return bool(self._devices.setdefault(name, tensor.device) == tensor.device)
        return False

    def _hold(self, name: str, handle: Any) -> None:
        before = self._held.pop(name, None)
        if before is not None:
            before.remove()
        self._held[name] = handle

    def detach(self) -> None:
        """Remove every hook."""
        while self._held:
            self._held.popitem()[1].remove()
        super().detach()


class WatchedParameter:
    """A parameter and its gradient, each time a backward pass has added to it."""

    def __init__(self, parameter: torch.nn.Parameter, watching: Watching, title: str) -> None:
        self._parameter: torch.nn.Parameter | None = parameter
        self._watching = watching
        self._title = title
        self._handle: Any = None

    def attach(self) -> None:
        """Put the hook in place; one that is frozen is taken once."""
        parameter = self._parameter
        assert parameter is not None
        if parameter.requires_grad:
            self._handle = parameter.register_post_accumulate_grad_hook(self._on_gradient)
        else:
            self._on_gradient(parameter)
        self._parameter = None  # the hook is told which it is

    def detach(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        watching = self._watching
        if not watching.on or not pipeline.enabled:
            return
        name, settings = self._title, watching.settings
        try:
            step, call = watching.place(name)
            for wanted, kind, tensor in (
                (settings.activations, Kind.WEIGHT, parameter),
                (settings.gradients, Kind.WEIGHT_GRADIENT, parameter.grad),
            ):
                if wanted and tensor is not None and watching.due(name, kind):
                    watching.observe(*seen_of(name, kind, tensor, call), step)
        except Exception as error:
            pipeline.fault(name, error)


class WatchedTensor:
    """The gradient of a tensor, whenever one is computed, and its value if both are wanted."""

    def __init__(self, tensor: torch.Tensor, watching: Watching, title: str) -> None:
        if not tensor.requires_grad:
            raise TypeError(
                f"{title!r} needs no gradient, so there is nothing to wait for: take its value "
                "with watcher.catch(tensor, name)"
            )
        self._tensor = weakref.ref(tensor)
        self._watching = watching
        self._title = title
        self._handle: Any = None

    def attach(self) -> None:
        """Put the hook in place."""
        tensor = self._tensor()
        assert tensor is not None
        self._handle = tensor.register_hook(self._on_gradient)

    def detach(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()

    def _on_gradient(self, gradient: torch.Tensor | None) -> None:
        watching = self._watching
        if gradient is None or not watching.on or not pipeline.enabled:
            return
        name, settings = self._title, watching.settings
        both = settings.activations and settings.gradients
        try:
            step, call = watching.place(name)
            for kind, tensor in (
                (Kind.VALUE, self._tensor() if both else None),
                (Kind.GRADIENT, gradient),
            ):
                if tensor is not None and watching.due(name, kind):
                    watching.observe(*seen_of(name, kind, tensor, call), step)
        except Exception as error:
            pipeline.fault(name, error)


def watched(target: Any, watching: Watching, title: str) -> Any:
    """The target with its hooks to be; None of what is nothing of torch."""
    if isinstance(target, torch.nn.Module):
        return WatchedModule(target, watching, title)
    if isinstance(target, torch.nn.Parameter):
        return WatchedParameter(target, watching, title or "parameter")
    if isinstance(target, torch.Tensor):
        return WatchedTensor(target, watching, title or "tensor")
    return None
