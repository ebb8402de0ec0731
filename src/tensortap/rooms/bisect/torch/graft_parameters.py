"""Recorded gradients in place of computed ones before the optimizer's step, and its results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tensortap.core.record import Kind, TensorData
from tensortap.rooms.bisect.grafting import GraftSource, Swap
from tensortap.rooms.track.torch.layouts import like, local_part
from tensortap.rooms.track.torch.names import Names
from tensortap.rooms.track.torch.optimizers import parameters_of
from tensortap.values.snapshot import digest_of
from tensortap.values.torch.shards import local_shard, waited
from tensortap.values.torch.tensors import build


class ParameterGrafts:
    """The parameters of a model: every optimizer steps from recorded gradients."""

    def __init__(self, root: torch.nn.Module, source: GraftSource) -> None:
        self._root = root
        self._source = source
        self._undo: list[Callable[[], None]] = []
        self._names: dict[int, str] = {}
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._owners: dict[int, tuple[str, ...]] = {}
        self._before: GraftSource | None = None
        self.stepping: Callable[[Any], object] | None = None  # called with each optimizer once
        self._stepped: dict[int, Any] = {}  # optimizers, by id
        self._digests: dict[str, bytes] = {}  # of the weights before the step

    def attach(self) -> None:
        names = Names(self._root)
        for name, parameter in names.parameters():
            if self._names.setdefault(id(parameter), name) == name:
                self._parameters[name] = parameter
        for name, module in names.modules():
            for parameter in module.parameters(recurse=False):
                known = self._owners.get(id(parameter), ())
                self._owners[id(parameter)] = (*known, name)
        self._undo.append(register_optimizer_step_pre_hook(self._on_step).remove)

    def begin(self) -> None:
        """Remember the weights that the step starts from."""
        self._digests = {
            name: digest_of(computed_part(each)) for name, each in self._parameters.items()
        }

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._names.clear()
        self._parameters.clear()
        self._owners.clear()
        self._stepped.clear()

    def load(self, before: GraftSource) -> None:
        """Put recorded weights into the model, and state into each optimizer before its step.

        Those that the model was made with are judged: later ones went their own way.
        """
        self._before = before
        with torch.no_grad():
            for name, parameter in Names(self._root).parameters():
                data = before.recorded(name, Kind.WEIGHT)
                if data is None:
                    continue
                found = recorded_part(data, parameter)
                if before.is_initial and name in self._parameters:
                    owners = functools.partial(self._owned_by, parameter)
                    computed = computed_part(parameter)
                    self._source.swap(
                        Swap(name, Kind.WEIGHT, computed, found, readers=owners, before=True)
                    )
                if found.shape == local_part(parameter.data).shape:
                    local_part(parameter.data).copy_(found)

    def _on_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if any(callable(each) for each in (*args[1:], *kwargs.values())):
            return  # a closure computes the gradients within the step
        known = [each for each in parameters_of(optimizer) if id(each) in self._names]
        if not known:
            return
        if id(optimizer) not in self._stepped:
            self._stepped[id(optimizer)] = optimizer
            if self.stepping is not None:
                self.stepping(optimizer)
        for parameter in known:
            self._exchange_gradient(parameter)
            if self._before is not None:
                self._load_state(self._before, optimizer, parameter)

    def _owned_by(self, parameter: torch.nn.Parameter) -> tuple[str, ...]:
        return self._owners.get(id(parameter), ())

    def _exchange_gradient(self, parameter: torch.nn.Parameter) -> None:
        name = self._names[id(parameter)]
        gradient = parameter.grad
        data = self._source.recorded(name, Kind.WEIGHT_GRADIENT)
        if data is None:
            return
        found = recorded_part(data, parameter)
        computed = None if gradient is None else computed_part(gradient)
        owners = functools.partial(self._owned_by, parameter)
        self._source.swap(Swap(name, Kind.WEIGHT_GRADIENT, computed, found, readers=owners))
        with torch.no_grad():
            if gradient is None:
                parameter.grad = like(parameter, found)
            else:
                local_part(gradient).copy_(found)

    def _load_state(self, before: GraftSource, optimizer: Any, parameter: Any) -> None:
        name = self._names[id(parameter)]
        state = optimizer.state[parameter]
        for key in before.states(name):
            present = state.get(key)
            data = before.recorded(f"{name}.{key}", Kind.OPTIMISER_STATE)
            if data is None:
                continue
            found = recorded_part(data, parameter if present is None else present)
            if isinstance(present, (int, float)):
                state[key] = type(present)(found.item())
            elif isinstance(present, torch.Tensor):
                with torch.no_grad():
                    local_part(present).copy_(found)
            else:
                state[key] = like(parameter, found) if found.ndim else found

    def end_step(self) -> None:
        """Judge what the optimizers have made; without one, the gradients."""
        if not self._stepped:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    self._exchange_gradient(parameter)
        states = {
            id(parameter): optimizer.state.get(parameter) or {}
            for optimizer in self._stepped.values()
            for parameter in parameters_of(optimizer)
        }
        for parameter in self._parameters.values() if self._stepped else ():
            self._judge_step(states.get(id(parameter), {}), parameter)

    def _judge_step(self, state: dict[Any, Any], parameter: Any) -> None:
        name = self._names[id(parameter)]
        owners = functools.partial(self._owned_by, parameter)
        unchanged = self._digests.get(name) == digest_of(computed_part(parameter))
        found: list[tuple[str, Kind, Any]] = [(name, Kind.WEIGHT, parameter)]
        for key, value in state.items():
            if isinstance(value, (int, float)):
                value = torch.tensor(value, dtype=torch.float64)
            if isinstance(value, torch.Tensor):
                found.append((f"{name}.{key}", Kind.OPTIMISER_STATE, value))
        for label, kind, value in found:
            data = self._source.recorded(label, kind)
            if data is not None:
                self._source.swap(Swap(
                    label, kind, computed_part(value), recorded_part(data, value), readers=owners,
                    unchanged=unchanged and kind is Kind.WEIGHT,
                ))  # fmt: skip


def computed_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor, detached; wait for a collective that computes it."""
    found: torch.Tensor = local_part(waited(tensor.detach()))
    return found


def recorded_part(data: TensorData, tensor: Any) -> torch.Tensor:
    """Return a recorded tensor, or the part of it that this rank has of a DTensor."""
    found: torch.Tensor = build(msgspec.structs.replace(data, framework="torch"))
    if type(tensor) is not torch.Tensor and hasattr(tensor, "to_local"):
        local, shard = local_shard(tensor)
        if found.shape == tensor.shape != local.shape:
            pairs = zip(shard.offsets, local.shape, strict=True)
            found = found[tuple(slice(start, start + size) for start, size in pairs)]
    return found
