"""The dtypes in which the layers of a torch model compute, in few steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from tensortap.frameworks.observing import tensors_in
from tensortap.frameworks.steps import PrecisionFacts
from tensortap.frameworks.torch.hooks import ModuleHook, hook_module
from tensortap.frameworks.torch.samples import is_checked

_CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # that autocast runs in 16 bits


class PrecisionWatch:
    """Watches in which dtypes the layers that autocast concerns compute."""

    def __init__(self, root: nn.Module, guarded: Callable[..., None]) -> None:
        self._root = root
        self._guarded = guarded
        self._undo: list[Callable[[], None]] = []
        self._number = 0
        self._is_checked = True
        self._forget()

    def _forget(self) -> None:
        self._low: dict[str, None] = {}  # layers that computed in 16 bits
        self._full: dict[str, None] = {}
        self._double = False
        self._autocast: Literal["", "forward", "after"] = ""

    def attach(self) -> None:
        layers = [(name, m) for name, m in self._root.named_modules() if isinstance(m, _CAST)]
        for name, module in layers:
            self._undo.append(hook_module(module, ModuleHook(self._hook(name))))
        hook = ModuleHook(functools.partial(self._guarded, self._on_result))
        self._undo.append(hook_module(self._root, hook))

    def detach(self) -> None:
        while self._undo:
            self._guarded(self._undo.pop())

    def _hook(self, name: str) -> Callable[..., None]:
        """Return a hook on a layer that returns at once in most steps: there are many of them."""

        def look(*args: Any) -> None:
            if self._is_checked:
                self._guarded(self._on_output, name, *args)

        return look

    def _looks(self) -> bool:
        return self._is_checked and self._root.training and torch.is_grad_enabled()

    def _on_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._looks() and isinstance(output, torch.Tensor):
            if output.dtype in (torch.float16, torch.bfloat16):
                self._low[name] = None
            elif output.dtype is torch.float32:
                self._full[name] = None

    def _on_result(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._looks():
            given = [tensor.dtype for _, tensor in tensors_in(args, torch.Tensor)]
            made = [tensor.dtype for _, tensor in tensors_in(output, torch.Tensor)]
            self._double = torch.float64 in made and torch.float64 not in given
            if _is_autocast(self._root):
                self._autocast = "forward"

    def on_computed(self) -> None:
        """Note whether autocast is active in the backward pass, or in the optimizer's step."""
        if not self._autocast and _is_autocast(self._root):
            self._autocast = "after"

    def end_step(self) -> PrecisionFacts | None:
        """Return the facts of the step, None if nobody looked; begin the next one."""
        looked = self._is_checked and bool(self._low or self._full or self._double)
        facts = None
        if looked:
            dtypes = {p.dtype for p in self._root.parameters() if p.is_floating_point()}
            facts = PrecisionFacts(
                dtypes == {torch.float32},
                tuple(self._low),
                tuple(name for name in self._full if name not in self._low),
                self._double and torch.float64 not in dtypes,
                self._autocast,
            )
        self._number += 1
        self._is_checked = is_checked(self._number)
        self._forget()
        return facts


def _is_autocast(root: nn.Module) -> bool:
    """Return whether autocast is active here for the device of a model."""
    parameter = next(root.parameters(), None)
    try:
        return parameter is not None and torch.is_autocast_enabled(parameter.device.type)
    except (TypeError, RuntimeError):  # before torch 2.4; a device without autocast
        return False
