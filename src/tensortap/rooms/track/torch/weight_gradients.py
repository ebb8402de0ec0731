"""Gradients of parameters: which of them belong to this step, and which are left over."""

from __future__ import annotations

import weakref

import torch

from tensortap.values.torch.private import version_of


class WeightGradients:
    """Tells gradients of this step, observed or not, from those that are left over."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}
        self._accumulated: dict[str, int] = {}  # the version when a gradient was last added to
        self._known: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}

    def end_step(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        """Forget this step; gradients that exist now are not new in the next one."""
        self._calls.clear()
        self._accumulated.clear()
        self._known.clear()
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                self._known[name] = (weakref.ref(parameter.grad), version_of(parameter.grad))

    def accumulated(self, name: str, gradient: torch.Tensor) -> None:
        """Note that a gradient was computed."""
        self._accumulated[name] = version_of(gradient)

    def count(self, name: str, gradient: torch.Tensor) -> int:
        """Note that a gradient is observed; return its index within the step."""
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        self._known[name] = (weakref.ref(gradient), version_of(gradient))
        return call

    def was_observed(self, name: str) -> bool:
        """Return whether a gradient of this name was observed in this step."""
        return name in self._calls

    def has(self, name: str, gradient: torch.Tensor | None) -> bool:
        """Return whether a gradient of this name was computed in this step, as far as is known."""
        computed = name in self._calls or name in self._accumulated
        return computed or (gradient is not None and self.is_new(name, gradient))

    def is_new(self, name: str, gradient: torch.Tensor) -> bool:
        """Return whether this is another gradient, or another value, than the last known one."""
        known = self._known.get(name)
        return known is None or known[1] != version_of(gradient) or known[0]() is not gradient

    def was_zeroed(self, name: str, gradient: torch.Tensor | None) -> bool:
        """Return whether a gradient was computed in this step and then set to None or zero."""
        version = self._accumulated.get(name)
        if version is None:
            return False
        if gradient is None:
            return True
        return bool(version_of(gradient) != version and not gradient.any())
