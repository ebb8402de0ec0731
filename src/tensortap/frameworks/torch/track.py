"""Hooks that track a torch model: its modules' outputs, its parameters, its optimizers."""

from __future__ import annotations

from typing import Any

import torch

from tensortap.frameworks.observing import TrackObserver
from tensortap.frameworks.torch.outputs import OutputHooks
from tensortap.frameworks.torch.parameters import ParameterHooks


class ModelHooks:
    """Hooks on a model and its optimizers."""

    def __init__(self, root: torch.nn.Module, optimizer: Any, observer: TrackObserver) -> None:
        self._outputs = OutputHooks(root, observer)
        self._parameters = ParameterHooks(root, optimizer, observer)

    def attach(self) -> None:
        """Install the hooks."""
        self._outputs.attach()
        self._parameters.attach()

    def detach(self) -> None:
        """Remove every hook."""
        try:
            self._outputs.detach()
        finally:
            self._parameters.detach()

    def end_step(self) -> None:
        """Observe weights, gradients and optimizer state after the optimizer's step."""
        try:
            self._parameters.end_step()
        finally:
            self._outputs.end_step()
