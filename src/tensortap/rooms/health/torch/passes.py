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

from tensortap.rooms.health.step_facts import PassFacts, PrecisionFacts
from tensortap.rooms.track.observing import inputs_of, tensors_in
from tensortap.rooms.track.torch.hooks import ModuleHook, hook_module
from tensortap.values.torch.hidden import hide_from_compiler
from tensortap.values.torch.private import backward_pass
from tensortap.values.torch.tensors import quiet, why_not

_FIRST_EVALUATIONS = 16
_ROWS, _COLUMNS = 64, 256  # that are compared
_MOST_PASSES = 8  # of a step
_MOST_OUTPUTS = 4
_CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # that autocast runs in 16 bits


def is_checked(number: int) -> bool:
    """Return whether values are looked at in a step, counted from where tracking began.

    >>> [number for number in range(400) if is_checked(number)][-5:]
    [80, 90, 100, 200, 300]
    """
    return number % (10 if number <= 100 else 100) == 0


def is_readable(tensor: object) -> bool:
    """Return whether the values of a tensor are plain memory of the CPU, for which nobody waits."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    assert isinstance(tensor, torch.Tensor)
    return tensor.is_cpu and tensor.numel() > 0 and not why_not(tensor)


def sample(tensor: torch.Tensor, most: int = 1024) -> torch.Tensor:
    """Return a copy of up to `most` values that are spread over a tensor.

    >>> sample(torch.arange(10), 3).tolist()
    [0, 5]
    """
    flat = tensor.detach().reshape(-1)
    # odd, so that not all values of a matrix are from the same column
    return flat[:: -(-len(flat) // most) | 1].clone()


class _Pass:
    """A forward pass that is looked at."""

    def __init__(self, training: bool, given: torch.Tensor | None) -> None:
        self.training, self.gradients = training, torch.is_grad_enabled()
        self.rms: float | None = None
        self.rows_differ = False
        with quiet():
            if given is not None and is_readable(given):
                self.rms, self.rows_differ = _rms(given), _rows_are_equal(given) is False
        self.differentiable = self.used = self.waited = self.ignores_input = False
        self.random = False
        self.generator = None if training else torch.get_rng_state()

    def facts(self) -> PassFacts:
        unused = self.differentiable and not self.used
        return PassFacts(
            self.training, self.gradients, unused, self.ignores_input, self.rms, self.random
        )


class PassWatch:
    """Watches the forward passes of a model, and in which dtypes its layers compute."""

    def __init__(self, root: nn.Module, guarded: Callable[..., None]) -> None:
        self._root = root
        self._guarded = guarded
        self._undo: list[Callable[[], None]] = []
        self._number = self._evaluations = 0
        self._is_checked = True  # whether dtypes are looked at in this step
        self._passes: list[_Pass] = []
        self._running: _Pass | None = None
        self._forget_dtypes()

    def _forget_dtypes(self) -> None:
        self._low: dict[str, None] = {}  # layers that computed in 16 bits
        self._full: dict[str, None] = {}
        self._double = False
        self._autocast: Literal["", "forward", "after"] = ""

    def attach(self) -> None:
        before = ModuleHook(functools.partial(self._guarded, self._on_inputs))
        after = ModuleHook(functools.partial(self._guarded, self._on_output))
        self._undo.append(hook_module(self._root, before, before=True, with_kwargs=True))
        for name, module in self._root.named_modules():
            if isinstance(module, _CAST):
                self._undo.append(hook_module(module, ModuleHook(self._layer_hook(name))))
        self._undo.append(hook_module(self._root, after))

    def detach(self) -> None:
        while self._undo:
            self._guarded(self._undo.pop())
        self._passes.clear()

    @property
    def has_evaluated(self) -> bool:
        return any(not (each.training and each.gradients) for each in self._passes)

    def end_step(self) -> tuple[tuple[PassFacts, ...], PrecisionFacts | None]:
        """Return the passes of the step and its dtypes if somebody looked; begin the next one.

        Outputs may be differentiated after the end of a step, so unused ones wait for one more.
        """
        waiting = [p for p in self._passes if p.differentiable and not (p.used or p.waited)]
        done = [each for each in self._passes if each not in waiting]
        for each in waiting:
            each.waited = True
        precision = self._precision() if self._low or self._full or self._double else None
        self._passes, self._running = waiting, None
        self._number += 1
        self._is_checked = is_checked(self._number)
        self._forget_dtypes()
        return tuple(each.facts() for each in done), precision

    def _precision(self) -> PrecisionFacts:
        dtypes = {p.dtype for p in self._root.parameters() if p.is_floating_point()}
        return PrecisionFacts(
            dtypes == {torch.float32},
            tuple(self._low),
            tuple(name for name in self._full if name not in self._low),
            self._double and torch.float64 not in dtypes,
            self._autocast,
        )

    def _on_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._running = None
        if backward_pass() != -1 or len(self._passes) >= _MOST_PASSES:
            return
        training = self._root.training
        if training and torch.is_grad_enabled():
            looks = self._is_checked
        else:
            self._evaluations += 1
            looks = is_checked(self._evaluations) or self._evaluations <= _FIRST_EVALUATIONS
        if not looks:
            return
        first = next((tensor for _, tensor in inputs_of(args, kwargs, torch.Tensor)), None)
        self._running = _Pass(training, first)
        self._passes.append(self._running)

    def _on_output(self, module: nn.Module, args: Any, output: Any) -> None:
        looks_at_dtypes = self._looks_at_dtypes()
        if self._running is None and not looks_at_dtypes:
            return
        found = [tensor for _, tensor in tensors_in(output, torch.Tensor)]
        if looks_at_dtypes:
            given = [tensor.dtype for _, tensor in tensors_in(args, torch.Tensor)]
            made = [tensor.dtype for tensor in found]
            self._double = torch.float64 in made and torch.float64 not in given
            if _is_autocast(self._root):
                self._autocast = "forward"
        running, self._running = self._running, None
        if running is None:
            return
        before, running.generator = running.generator, None
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            # a dropout module that is left in train() mode is meant to be random
            running.random = not any(each.training for each in self._root.modules())
        with quiet():
            if running.rows_differ and found and is_readable(found[0]):
                is_float = found[0].is_floating_point()
                running.ignores_input = is_float and _rows_are_equal(found[0]) is True
        if not running.gradients:
            return
        differentiable = [each for each in found if each.requires_grad and not each.is_leaf]
        for tensor in differentiable[:_MOST_OUTPUTS]:
            running.differentiable = True
            look = functools.partial(self._guarded, _on_gradient, running)
            hide_from_compiler(look)
            tensor.register_hook(torch.utils.hooks.unserializable_hook(look))

    def _layer_hook(self, name: str) -> Callable[..., None]:
        """Return a hook on a layer that returns at once in most steps: there are many of them."""

        def look(*args: Any) -> None:
            if self._is_checked:
                self._guarded(self._on_layer, name, *args)

        return look

    def _looks_at_dtypes(self) -> bool:
        return self._is_checked and self._root.training and torch.is_grad_enabled()

    def _on_layer(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._looks_at_dtypes() and isinstance(output, torch.Tensor):
            if output.dtype in (torch.float16, torch.bfloat16):
                self._low[name] = None
            elif output.dtype is torch.float32:
                self._full[name] = None

    def on_computed(self) -> None:
        """Note whether autocast is active in the backward pass, or in the optimizer's step."""
        if self._is_checked and not self._autocast and _is_autocast(self._root):
            self._autocast = "after"


def _on_gradient(this: _Pass, gradient: torch.Tensor | None) -> None:
    this.used = True


def _rms(tensor: torch.Tensor) -> float | None:
    """Return the root mean square of a sample of floats; None if it is not finite."""
    if not tensor.is_floating_point():
        return None
    rms = float(sample(tensor).double().square().mean().sqrt())
    return rms if math.isfinite(rms) else None  # other rules report it


def _rows_are_equal(tensor: torch.Tensor) -> bool | None:
    """Return whether all rows of a tensor are the same; None if there are no two rows."""
    if tensor.ndim < 2 or len(tensor) < 2 or tensor[0].numel() < 2:
        return None
    rows = tensor.detach()[:_ROWS].reshape(min(len(tensor), _ROWS), -1)
    rows = rows[:, :: -(-rows.shape[1] // _COLUMNS) | 1]
    return bool((rows[1:] == rows[0]).all())


def _is_autocast(root: nn.Module) -> bool:
    """Return whether autocast is active here for the device of a model."""
    parameter = next(root.parameters(), None)
    try:
        return parameter is not None and torch.is_autocast_enabled(parameter.device.type)
    except (TypeError, RuntimeError):  # before torch 2.4; a device without autocast
        return False
