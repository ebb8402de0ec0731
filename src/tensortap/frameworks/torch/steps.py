"""Facts about a training step of torch, for rules of steps.

Version counters tell what was changed and when, without looking at values. Whether gradients were
zeroed, kept or used twice is the same for all parameters of an optimizer, so three of them are
watched.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tensortap.frameworks.steps import GroupFacts, InitialWeight, ParameterFacts, StepFacts
from tensortap.frameworks.torch.optimizers import FoundOptimizer, before_zero_grad, parameters_of
from tensortap.frameworks.torch.private import version_of
from tensortap.frameworks.torch.summarize import summarize
from tensortap.frameworks.torch.tensors import view
from tensortap.record import Summary
from tensortap.stats.shard_digest import shard_digest

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_WITH_FAN_IN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _Version:
    """A gradient as it was at some time."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self._tensor = weakref.ref(gradient)
        self._version = version_of(gradient)

    def is_at(self, gradient: torch.Tensor | None, changes: int = 0) -> bool:
        """Return whether this is the gradient, changed in place so many times since."""
        if gradient is None or self._tensor() is not gradient:
            return False
        return version_of(gradient) == self._version + changes


class _WatchedGradient:
    """The gradient of one parameter, between two steps of its optimizer."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = weakref.ref(parameter)
        self._computed = 0  # times since the last step
        self._discarded = self._carried = False
        self._used: _Version | None = None  # by the last step
        self._latest: _Version | None = None

    def on_computed(self) -> None:
        """Note that a backward pass has added to the gradient, or created it."""
        gradient = self._gradient()
        if gradient is None:
            return
        # whatever zeroes a gradient in place counts as a change of its own
        before = self._latest if self._computed else self._used
        kept = before is not None and before.is_at(gradient, changes=1)
        self._carried = kept and (self._carried or not self._computed)
        self._computed += 1
        self._discarded = False
        self._latest = _Version(gradient)

    def on_zeroed(self) -> None:
        """Note that the optimizer is about to zero the gradient."""
        self._discarded = bool(self._computed)
        self._carried = False

    def before_step(self) -> tuple[bool, bool, bool]:
        """Return whether the gradient was discarded, added to an old one, or is the old one."""
        gradient = self._gradient()
        lost = bool(self._computed) and (gradient is None or self._discarded)
        same = not self._computed and self._used is not None and self._used.is_at(gradient)
        return lost, self._carried and gradient is not None, same

    def after_step(self) -> None:
        gradient = self._gradient()
        self._computed, self._carried = 0, False
        self._used = None if gradient is None else _Version(gradient)

    def _gradient(self) -> torch.Tensor | None:
        parameter = self._parameter()
        return None if parameter is None else parameter.grad


class StepWatch:
    """Watches what happens to the parameters of a model in a step."""

    def __init__(
        self,
        root: nn.Module,
        optimizers: Sequence[FoundOptimizer],
        parameters: Callable[[], Mapping[str, nn.Parameter]],
        uncalled: Callable[[], set[str]],
        guarded: Callable[..., None],
    ) -> None:
        self._root = root
        inner = (each.optimizer for each in optimizers if not each.wraps)
        self._optimizers = [each for each in inner if isinstance(each, torch.optim.Optimizer)]
        self._parameters = parameters
        self._uncalled = uncalled
        self._guarded = guarded
        self._undo: list[Callable[[], object]] = []
        self._watched: dict[int, list[_WatchedGradient]] = {}  # by id of the optimizer
        self._versions: dict[str, tuple[int, int]] = {}  # address and version after the last step
        self._before: list[int] = []
        self._initial: tuple[InitialWeight, ...] = ()
        self._has_modes = False
        self._forget()

    def _forget(self) -> None:
        self._steps = 0
        self._discarded = self._carried = self._repeated = False
        self._optimized: set[int] = set()
        self._with_gradient: set[int] = set()
        self._dropout: dict[str, None] = {}

    def attach(self) -> None:
        self._initial = tuple(self._initial_weights())
        self._versions = self._versions_now()
        modes = [(name, each) for name, each in self._root.named_modules() if _has_mode(each)]
        self._has_modes = bool(modes)
        for name, module in modes:
            if isinstance(module, _DROPOUT):
                hook = functools.partial(self._guarded, self._on_dropout, name)
                self._undo.append(module.register_forward_pre_hook(hook).remove)
        for optimizer in self._optimizers:
            hooks = {
                optimizer.register_step_pre_hook: self._before_step,
                optimizer.register_step_post_hook: self._after_step,
            }
            for register, look in hooks.items():
                self._undo.append(register(functools.partial(self._guarded, look)).remove)
            self._undo.append(
                before_zero_grad(optimizer, functools.partial(self._guarded, self._on_zero_grad))
            )
            trained = [p for p in parameters_of(optimizer) if p.requires_grad]
            chosen = {
                id(p): p for p in (*trained[:1], *trained[len(trained) // 2 :][:1], *trained[-1:])
            }
            watched = self._watched[id(optimizer)] = []
            for parameter in chosen.values():
                gradient = _WatchedGradient(parameter)
                watched.append(gradient)
                hook = functools.partial(self._guarded, self._on_computed, gradient)
                self._undo.append(parameter.register_post_accumulate_grad_hook(hook).remove)

    def detach(self) -> None:
        while self._undo:
            self._guarded(self._undo.pop())
        self._watched.clear()
        self._versions.clear()
        self._forget()

    # -- within a step -------------------------------------------------------------------

    def _on_dropout(self, name: str, module: nn.Module, args: Any) -> None:
        if module.training and module.p and not torch.is_grad_enabled():
            self._dropout[name] = None

    def _on_computed(self, gradient: _WatchedGradient, parameter: nn.Parameter) -> None:
        gradient.on_computed()

    def _on_zero_grad(self, optimizer: Any) -> None:
        for gradient in self._watched.get(id(optimizer), ()):
            gradient.on_zeroed()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._before = []
        if any(callable(argument) for argument in (*args[1:], *kwargs.values())):
            return  # a closure computes the gradients within the step
        self._steps += 1
        found = [each.before_step() for each in self._watched.get(id(optimizer), ())]
        if found:
            lost, carried, same = (all(flags) for flags in zip(*found, strict=True))
            self._discarded |= lost
            self._carried |= carried
            self._repeated |= same
        self._before = [version_of(parameter) for parameter in parameters_of(optimizer)]

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for gradient in self._watched.get(id(optimizer), ()):
            gradient.after_step()
        for parameter, before in zip(parameters_of(optimizer), self._before, strict=False):
            if version_of(parameter) != before:
                self._optimized.add(id(parameter))
            if parameter.grad is not None:
                self._with_gradient.add(id(parameter))

    # -- its end -------------------------------------------------------------------------

    def end_step(self, step: int) -> StepFacts:
        """Return the facts of the step, and begin the next one."""
        parameters = self._parameters()
        versions, uncalled = self._versions_now(), self._uncalled()
        optimized = {id(p) for each in self._optimizers for p in parameters_of(each)}
        known = {id(p) for p in parameters.values()}
        found = tuple(
            ParameterFacts(
                name,
                parameter.requires_grad,
                id(parameter) in optimized,
                name.rpartition(".")[0] not in uncalled,
                parameter.grad is not None or id(parameter) in self._with_gradient,
                self._versions.get(name) != versions[name],
                id(parameter) in self._optimized,
            )
            for name, parameter in parameters.items()
        )
        groups = [group for each in self._optimizers for group in each.param_groups]
        facts = StepFacts(
            step,
            found,
            tuple(GroupFacts(i, float(group.get("lr", 1.0))) for i, group in enumerate(groups)),
            self._steps,
            len(optimized - known),
            self._discarded,
            self._carried,
            self._repeated,
            self._has_modes and bool(self._steps) and not self._root.training,
            tuple(self._dropout),
            self._initial,
        )
        self._initial = ()
        self._versions = versions
        self._forget()
        return facts

    def _versions_now(self) -> dict[str, tuple[int, int]]:
        return {name: (id(p), version_of(p)) for name, p in self._parameters().items()}

    def _initial_weights(self) -> Iterator[InitialWeight]:
        layers = [module for module in self._root.modules() if isinstance(module, _WITH_FAN_IN)]
        with_fan_in = {id(layer.weight) for layer in layers}
        for name, parameter in self._parameters().items():
            if parameter.ndim < 2 or not parameter.is_floating_point():
                continue
            if hasattr(parameter, "device_mesh"):  # of which this rank has only a part
                continue
            summary = summarize(parameter.detach())
            values = view(parameter.detach())
            if not isinstance(summary, Summary) or values is None:
                continue  # on a device, where nobody waits for it
            yield InitialWeight(
                name,
                summary,
                parameter[0].numel() if id(parameter) in with_fan_in else 0,
                shard_digest(values) if parameter.requires_grad else b"",
            )


def _has_mode(module: nn.Module) -> bool:
    return isinstance(module, (*_DROPOUT, *_BATCH_NORM))
