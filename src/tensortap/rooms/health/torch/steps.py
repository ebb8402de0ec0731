"""Facts about a training step of torch, for rules of steps.

Version counters tell what was changed and when, without looking at values. Whether gradients were
zeroed or kept is the same for all parameters of an optimizer, so three of them are watched.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import unserializable_hook

from tensortap.rooms.health.steps import ParameterFacts, StepFacts, empty_step
from tensortap.rooms.health.torch.losses import LossWatch, on_backward
from tensortap.rooms.health.torch.passes import PassWatch, is_checked
from tensortap.rooms.health.torch.probe import is_norm_with_modes
from tensortap.rooms.health.torch.structure import (
    Unregistered,
    initial_weights,
    left_out,
    repeated_layers,
    unregistered_parameters,
)
from tensortap.rooms.track.observer import Observer
from tensortap.rooms.track.torch.hooks import BreakingHook, ModuleHook, hook_module
from tensortap.rooms.track.torch.optimizers import before_zero_grad, hook_step, parameters_of
from tensortap.rooms.track.torch.reading import is_plain, sample
from tensortap.rooms.track.torch.track import TrackedModule
from tensortap.values.torch.private import backward_pass, version_of
from tensortap.values.torch.tensors import quiet

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_WITH_MODES = (*_DROPOUT, nn.SyncBatchNorm)


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
        self._new: torch.Tensor | None = None  # a sample of what is added to the gradient
        self._computed = 0  # times since the last step
        self._discarded = self._carried = False
        self._zeroed = 0  # times that fresh gradients were zeroed since the last step
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
        if kept and not self._computed and is_plain(gradient):
            kept = self._is_sum(gradient)
        self._carried = kept and (self._carried or not self._computed)
        self._computed += 1
        self._discarded = False
        self._latest = _Version(gradient)

    def on_new(self, gradient: torch.Tensor) -> None:
        """Note what is about to be added to the gradient, if that is the one of the last step."""
        before = self._used if not self._computed else None
        looks = before is not None and before.is_at(self._gradient()) and is_plain(gradient)
        with quiet():
            self._new = sample(gradient) if looks else None

    def _is_sum(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient is more than what was added last.

        ``grad.data.zero_()`` leaves no trace in the version of a gradient.
        """
        new, self._new = self._new, None
        with quiet():
            return new is not None and not torch.equal(new, sample(gradient))

    def on_zeroed(self) -> None:
        """Note that the optimizer is about to zero the gradient."""
        self._zeroed += bool(self._computed) and not self._discarded
        self._discarded = bool(self._computed)
        self._carried = False

    def before_step(self) -> tuple[bool, bool, bool]:
        """Return whether the gradient was discarded, all but the last, or added to an old one."""
        gradient = self._gradient()
        lost = bool(self._computed) and (gradient is None or self._discarded)
        return lost, self._zeroed > 1 and not lost, self._carried and gradient is not None

    def after_step(self) -> None:
        gradient = self._gradient()
        self._computed = self._zeroed = 0
        self._carried = False
        self._used = None if gradient is None else _Version(gradient)

    def _gradient(self) -> torch.Tensor | None:
        parameter = self._parameter()
        return None if parameter is None else parameter.grad


class StepHooks:
    """Hooks that hand the facts of each step of a tracked model to `check`."""

    def __init__(
        self, tracked: TrackedModule, observer: Observer, check: Callable[[StepFacts], None]
    ) -> None:
        self._tracked, self._observer, self._check = tracked, observer, check
        self._root = tracked.root
        self._passes = PassWatch(tracked.root, self._guarded)
        self._losses = LossWatch(lambda: self._passes.entries)
        inner = (each.optimizer for each in tracked.optimizers if not each.wraps)
        self._optimizers = [each for each in inner if isinstance(each, torch.optim.Optimizer)]
        self._undo: list[Callable[[], object]] = []
        self._watched: dict[int, list[_WatchedGradient]] = {}  # by id of the optimizer
        self._versions: dict[str, tuple[int, int]] = {}  # id and version after the last step
        self._before: list[int] = []
        self._number = 0  # of the step since tracking began
        self._handles: dict[int, Any] = {}  # of hooks on gradients, by the id of a parameter
        self._unregistered: Unregistered = {}
        self._initial: dict[str, Any] = {}  # facts that are given once
        self._has_modes = False
        self._forget()

    def _forget(self) -> None:
        self._steps = 0
        self._discarded = self._zeroed = self._carried = False
        self._trainable: set[int] = set()  # those of them that required gradients then
        self._with_gradient: set[int] = set()
        self._dropout: dict[str, None] = {}

    def _guarded(self, look: Callable[..., object], *args: Any) -> None:
        try:
            look(*args)
        except Exception as error:
            self._observer.fault("training step", error)

    def attach(self) -> None:
        parameters = self._tracked.parameters(True)
        if not self._number:
            self._initial = {
                "initial": tuple(initial_weights(self._root, parameters, self._trained())),
                "repeated_layers": repeated_layers(self._root),
            }
            self._unregistered = unregistered_parameters(self._root)
        self._versions = _versions_of(parameters)
        self._has_modes = any(
            isinstance(each, _WITH_MODES) or is_norm_with_modes(each)
            for each in self._root.modules()
        )
        for name, module in self._root.named_modules():
            if isinstance(module, _DROPOUT):
                hook = ModuleHook(functools.partial(self._guarded, self._on_dropout, name))
                self._undo.append(hook_module(module, hook, before=True))
        self._undo += self._passes.attach()
        for optimizer in self._optimizers:
            self._attach_to(optimizer)
        self._note_gradients(parameters.values())
        self._undo.append(on_backward(functools.partial(self._guarded, self._losses.on_backward)))

    def _note_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note gradients where they are accumulated: whatever zeroes them later hides nothing.

        Of a parameter that an optimizer has, only the first is noted: its steps show the others.
        """
        optimized = self._trained()
        missed = functools.partial(self._observer.unseen.__setitem__, "optimizer")
        for parameter in parameters:
            if parameter.requires_grad and parameter.is_leaf and not is_lazy(parameter):
                once = id(parameter) in optimized
                look = functools.partial(self._guarded, self._on_gradient, once)
                hook = BreakingHook(look, missed)
                handle = parameter.register_post_accumulate_grad_hook(hook)
                self._handles[id(parameter)] = handle
                self._undo.append(handle.remove)

    def _on_gradient(self, once: bool, parameter: nn.Parameter) -> None:
        if parameter.grad is None:  # a compiled graph may give none
            return
        self._with_gradient.add(id(parameter))
        if once and (handle := self._handles.pop(id(parameter), None)) is not None:
            handle.remove()

    def _attach_to(self, optimizer: torch.optim.Optimizer) -> None:
        before, after, zeroed = (
            functools.partial(self._guarded, look)
            for look in (self._before_step, self._after_step, self._on_zero_grad)
        )
        missed = functools.partial(self._observer.unseen.__setitem__, "optimizer")
        self._undo += hook_step(optimizer, before, after, missed)
        self._undo.append(before_zero_grad(optimizer, zeroed, missed))
        parameters = parameters_of(optimizer)
        trained = [p for p in parameters if p.requires_grad and not is_lazy(p)]
        places = {0, len(trained) // 2, len(trained) - 1} if trained else ()
        watched = self._watched[id(optimizer)] = []
        for place in places:
            gradient = _WatchedGradient(trained[place])
            watched.append(gradient)
            hooks = gradient.on_new, functools.partial(self._on_computed, gradient)
            added, look = (
                BreakingHook(functools.partial(self._guarded, hook), missed) for hook in hooks
            )
            self._undo += [
                trained[place].register_hook(unserializable_hook(added)).remove,
                trained[place].register_post_accumulate_grad_hook(look).remove,
            ]

    def _trained(self) -> set[int]:
        return {id(p) for each in self._optimizers for p in parameters_of(each)}

    def detach(self) -> None:
        if self._dropout or self._passes.has_evaluated:  # after the last step
            self._guarded(self._end_step, True)
        self._guarded(self._check, empty_step(self._observer.step_number)._replace(ended=True))
        while self._undo:
            self._guarded(self._undo.pop())
        self._watched.clear()
        self._handles.clear()
        self._versions.clear()
        self._forget()

    # -- within a step -------------------------------------------------------------------

    def _on_dropout(self, name: str, module: nn.Module, args: Any) -> None:
        if backward_pass() != -1:
            self._dropout.pop(name, None)  # a checkpoint computes it again, with gradients
        elif module.training and self._root.training and not torch.is_grad_enabled():
            if vars(module).get("p"):
                self._dropout[name] = None

    def _on_computed(self, gradient: _WatchedGradient, parameter: nn.Parameter) -> None:
        gradient.on_computed()
        self._losses.on_computed()

    def _on_zero_grad(self, optimizer: Any) -> None:
        self._losses.on_zeroed()
        for gradient in self._watched.get(id(optimizer), ()):
            gradient.on_zeroed()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._before = versions_of(parameters_of(optimizer))
        self._steps += 1
        if _has_closure(args, kwargs):
            return  # it computes the gradients within the step
        self._judge_gradients(optimizer)

    def _judge_gradients(self, optimizer: Any, closure: bool = False) -> None:
        found = [each.before_step() for each in self._watched.get(id(optimizer), ())]
        if found:
            lost, zeroed, carried = (all(flags) for flags in zip(*found, strict=True))
            self._discarded |= lost
            self._zeroed |= zeroed and not closure  # which an optimizer may call several times
            self._carried |= carried

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _has_closure(args, kwargs):
            self._judge_gradients(optimizer, closure=True)
        for gradient in self._watched.get(id(optimizer), ()):
            gradient.after_step()
        parameters = list(parameters_of(optimizer))
        self._with_gradient.update(id(each) for each in parameters if each.grad is not None)
        for parameter, now, before in zip(
            parameters, versions_of(parameters), self._before, strict=False
        ):
            if now != before and parameter.requires_grad:  # it may be frozen until the end
                self._trainable.add(id(parameter))

    # -- its end -------------------------------------------------------------------------

    def end_step(self) -> None:
        self._end_step(self._observer.capturing)

    def _end_step(self, looked_up: bool) -> None:
        """Hand over the facts of the step, and begin the next one.

        `looked_up` says that the names of the parameters are those of now; else they are looked up
        every tenth step.
        """
        parameters = self._tracked.parameters(not looked_up and self._number % 10 == 0)
        versions, uncalled = _versions_of(parameters), self._tracked.uncalled()
        optimized = self._trained()
        found = tuple(
            ParameterFacts(
                name,
                (number := id(parameter)) in self._trainable or parameter.requires_grad,
                number in optimized,
                not uncalled or name.rpartition(".")[0] not in uncalled,
                number in self._with_gradient or parameter.grad is not None,
                self._versions.get(name) != versions[name],
            )
            for name, parameter in parameters.items()
        )
        groups = [group for each in self._optimizers for group in each.param_groups]
        passes, more = self._passes.end_step()
        losses = self._losses.end_step()
        facts = StepFacts(
            self._observer.step_number,
            found,
            tuple(float(group.get("lr", 1.0)) for group in groups),
            self._steps,
            len(optimized.difference(map(id, parameters.values()))),
            self._discarded,
            self._zeroed,
            self._carried,
            self._has_modes and bool(self._steps) and not self._root.training,
            tuple(self._dropout),
            passes,
            **more,
            **self._initial,
            unregistered=left_out(self._unregistered, optimized)
            if is_checked(self._number)
            else None,
            decays=tuple(float(group.get("weight_decay") or 0.0) for group in groups),
            losses=losses,
            seen=self._seen(),
        )
        self._initial = {}
        self._number += 1
        self._versions = versions
        self._forget()
        self._check(facts)

    def _seen(self) -> frozenset[str]:
        """Return what there was to look at until now."""
        passes, losses = self._passes, self._losses
        found = {
            "steps": bool(self._steps), "training": passes.has_trained,
            "evaluation": passes.was_evaluated, "loss": losses.values,
            "graph": losses.values and not losses.hidden,
        }  # fmt: skip
        return frozenset(name for name, is_there in found.items() if is_there)


def _has_closure(args: Any, kwargs: Any) -> bool:
    return any(callable(argument) for argument in (*args[1:], *kwargs.values()))


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return `version_of` of many tensors, faster."""
    tensors = list(tensors)
    try:
        return list(map(operator.attrgetter("_version"), tensors))
    except (AttributeError, RuntimeError):
        return list(map(version_of, tensors))


def _versions_of(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, tuple[int, int]]:
    found = parameters.values()
    return dict(zip(parameters, zip(map(id, found), versions_of(found), strict=True), strict=True))
