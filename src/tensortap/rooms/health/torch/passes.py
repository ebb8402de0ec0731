"""Forward passes of a torch model: their mode, inputs and outputs, and the dtypes of layers.

Few of them are looked at. Samples of inputs and outputs in the memory of the CPU are read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import unserializable_hook

from tensortap.rooms.health.steps import PassFacts
from tensortap.rooms.track.observing import inputs_of, tensors_in
from tensortap.rooms.track.torch.hooks import ModuleHook, hook_module
from tensortap.rooms.track.torch.reading import is_plain, sample
from tensortap.values.torch.hidden import hide_from_compiler
from tensortap.values.torch.private import backward_pass
from tensortap.values.torch.tensors import quiet

_CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # that autocast runs in 16 bits


def is_checked(number: int) -> bool:
    """Return whether values are looked at in a step, counted from where tracking began.

    >>> [number for number in range(400) if is_checked(number)][-5:]
    [80, 90, 100, 200, 300]
    """
    return number % (10 if number <= 100 else 100) == 0


class _Pass:
    """A forward pass that is looked at."""

    def __init__(self, training: bool, given: torch.Tensor | None) -> None:
        self.training, self.gradients = training, torch.is_grad_enabled()
        self.rms: float | None = None
        self.rows_differ = False
        with quiet():
            if given is not None and is_plain(given):
                self.rms, self.rows_differ = _rms(given), _rows_are_equal(given) is False
        self.differentiable = self.used = self.waited = self.ignores_input = self.random = False
        self.generator = None if training else torch.get_rng_state()

    def facts(self) -> PassFacts:
        unused = self.differentiable and not self.used
        return PassFacts(
            self.training, self.gradients, unused, self.ignores_input, self.rms, self.random
        )

    def on_gradient(self, gradient: torch.Tensor | None) -> None:
        self.used = True


class PassWatch:
    """Watches the forward passes of a model, and in which dtypes its layers compute."""

    def __init__(self, root: nn.Module, guarded: Callable[..., None]) -> None:
        self._root = root
        self._guarded = guarded
        self._number = self._evaluations = 0
        self._is_checked = True  # whether dtypes are looked at in this step
        self._passes: list[_Pass] = []
        self._running: _Pass | None = None
        self._forget_dtypes()

    def _forget_dtypes(self) -> None:
        self._dtypes: set[torch.dtype] = set()  # in which layers computed
        self._autocast_in_forward = self._autocast_after = False

    def attach(self) -> list[Callable[[], None]]:
        """Hook into the model; return functions that undo this."""
        before = ModuleHook(functools.partial(self._guarded, self._on_inputs))
        after = ModuleHook(functools.partial(self._guarded, self._on_output))
        layers = [module for module in self._root.modules() if isinstance(module, _CAST)]
        return [
            hook_module(self._root, before, before=True, with_kwargs=True),
            *(hook_module(layer, ModuleHook(self._on_layer)) for layer in layers),
            hook_module(self._root, after),
        ]

    @property
    def has_evaluated(self) -> bool:
        return any(not (each.training and each.gradients) for each in self._passes)

    def end_step(self) -> tuple[tuple[PassFacts, ...], Literal["", "forward", "after"] | None]:
        """Return the passes of the step, and where autocast was idle; begin the next one.

        Outputs may be differentiated after the end of a step, so unused ones wait for one more.
        """
        waiting = [p for p in self._passes if p.differentiable and not (p.used or p.waited)]
        found = tuple(each.facts() for each in self._passes if each not in waiting)
        for each in waiting:
            each.waited = True
        autocast = self._idle_autocast() if self._dtypes else None
        self._passes, self._running = waiting, None
        self._number += 1
        self._is_checked = is_checked(self._number)
        self._forget_dtypes()
        return found, autocast

    def _idle_autocast(self) -> Literal["", "forward", "after"]:
        stored = {p.dtype for p in self._root.parameters() if p.is_floating_point()}
        if stored != {torch.float32} or self._dtypes != {torch.float32}:
            return ""
        return "forward" if self._autocast_in_forward else "after" if self._autocast_after else ""

    def _on_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._running = None
        if backward_pass() != -1 or len(self._passes) >= 8:  # which are enough of one step
            return
        training = self._root.training
        if training and torch.is_grad_enabled():
            looks = self._is_checked
        else:
            self._evaluations += 1
            looks = is_checked(self._evaluations) or self._evaluations <= 16
        if looks:
            first = next((tensor for _, tensor in inputs_of(args, kwargs, torch.Tensor)), None)
            self._running = _Pass(training, first)
            self._passes.append(self._running)

    def _on_output(self, module: nn.Module, args: Any, output: Any) -> None:
        running, self._running = self._running, None
        if self._looks_at_dtypes():
            self._autocast_in_forward |= _is_autocast(self._root)
        if running is None:
            return
        before, running.generator = running.generator, None
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            # a dropout module that is left in train() mode is meant to be random
            running.random = not any(each.training for each in self._root.modules())
        first = next((tensor for _, tensor in tensors_in(output, torch.Tensor)), None)
        with quiet():
            if running.rows_differ and first is not None and is_plain(first):
                is_float = first.is_floating_point()
                running.ignores_input = is_float and _rows_are_equal(first) is True
        if first is not None and first.requires_grad and not first.is_leaf:
            running.differentiable = True
            look = functools.partial(self._guarded, running.on_gradient)
            hide_from_compiler(look)
            first.register_hook(unserializable_hook(look))

    def _looks_at_dtypes(self) -> bool:
        return self._is_checked and self._root.training and torch.is_grad_enabled()

    def _on_layer(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._looks_at_dtypes() and isinstance(output, torch.Tensor):
            self._dtypes.add(output.dtype)

    def on_computed(self) -> None:
        """Note whether autocast is active in the backward pass, or in the optimizer's step."""
        if self._is_checked:
            self._autocast_after |= _is_autocast(self._root)


def _rms(tensor: torch.Tensor) -> float | None:
    """Return the root mean square of a sample of floats; None if it is not finite."""
    if not tensor.is_floating_point():
        return None
    rms = float(sample(tensor).double().square().mean().sqrt())
    return rms if math.isfinite(rms) else None  # other rules report it


def _rows_are_equal(tensor: torch.Tensor) -> bool | None:
    """Return whether the first rows of a tensor are the same; None if there are no two rows."""
    if tensor.ndim < 2 or len(tensor) < 2 or tensor[0].numel() < 2:
        return None
    rows = tensor.detach()[:64].flatten(1)
    rows = rows[:, :: -(-rows.shape[1] // 256) | 1]
    return bool((rows[1:] == rows[0]).all())


def _is_autocast(root: nn.Module) -> bool:
    """Return whether autocast is active here for the device of a model."""
    parameter = next(root.parameters(), None)
    try:
        return parameter is not None and torch.is_autocast_enabled(parameter.device.type)
    except (TypeError, RuntimeError):  # before torch 2.4; a device without autocast
        return False
