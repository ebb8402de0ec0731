"""Training of a torch model on one batch, for `tap.rooms.widths.coord_check`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from numpy.typing import NDArray

from tensortap.rooms.widths.coordinates import WidthTask


@contextlib.contextmanager
def own_random_state() -> Iterator[Callable[[int], object]]:
    """Give a function that seeds random numbers; afterwards their state is as it was."""
    with torch.random.fork_rng():
        yield torch.manual_seed


def width_training(model: Any, optimizer: Any, task: WidthTask) -> TorchWidthTraining | None:
    """Return the training of a torch module; None for anything else."""
    is_module = isinstance(model, torch.nn.Module)
    return TorchWidthTraining(model, optimizer, task) if is_module else None


class TorchWidthTraining:
    """A torch model, its optimizer and the batch."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, task: WidthTask) -> None:
        self._model = model.train()
        self._task = task
        if optimizer is None and task.optimizer is not None:
            optimizer = task.optimizer(model)
        if optimizer is None:
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        self._optimizer = optimizer

    def step(self) -> dict[str, NDArray[Any]]:
        """Train for one step; return the outputs of all modules before the update, by name."""
        outputs: dict[str, NDArray[Any]] = {}

        def hook_for(name: str) -> Any:
            def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
                if isinstance(output, torch.Tensor) and output.is_floating_point():
                    outputs[name] = output.detach().double().cpu().numpy()

            return hook

        hooks = [
            module.register_forward_hook(hook_for(name or type(module).__name__))
            for name, module in self._model.named_modules()
        ]
        try:
            made = self._call()
        finally:
            for each in hooks:
                each.remove()
        loss = (self._task.loss or _default_loss)(made, self._task.targets)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return outputs

    def _call(self) -> Any:
        inputs = self._task.inputs
        if isinstance(inputs, dict):
            return self._model(**inputs)
        return self._model(*inputs) if isinstance(inputs, tuple) else self._model(inputs)


def _default_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if targets.is_floating_point():
        return torch.nn.functional.mse_loss(outputs, targets)
    return torch.nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
