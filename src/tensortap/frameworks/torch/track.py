"""A torch model under observation: its modules' outputs and its parameters."""

from __future__ import annotations

from typing import Any

import torch

from tensortap.frameworks.torch.outputs import Outputs
from tensortap.frameworks.torch.parameters import Parameters
from tensortap.sources.observer import Observer


class TorchHooks:
    """Hooks on a model and its optimizer; `attach` and `detach` them, `end_step` at each step."""

    def __init__(self, root: torch.nn.Module, optimizer: Any, observer: Observer) -> None:
        self._outputs = Outputs(root, observer)
        self._parameters = Parameters(root, optimizer, observer)

    def attach(self) -> None:
        """Put the hooks in place."""
        self._outputs.attach()
        self._parameters.attach()

    def detach(self) -> None:
        """Remove every hook."""
        try:
            self._outputs.detach()
        finally:
            self._parameters.detach()

    def end_step(self) -> None:
        """Observe what is there once the optimizer has done its work."""
        try:
            self._parameters.end_step()
        finally:
            self._outputs.end_step()
