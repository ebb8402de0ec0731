"""Training of a torch model on one batch, for `tap.rooms.widths.coord_check`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from numpy.typing import NDArray


@contextlib.contextmanager
def own_random_state() -> Iterator[Callable[[int], object]]:
    """Give a function that seeds random numbers; afterwards their state is as it was."""
    with torch.random.fork_rng():
        yield torch.manual_seed


class WidthTraining:
    """A model, its optimizer and the batch on which it is trained."""

    def __init__(self, made: Any, batch: tuple[Any, Any], loss: Any, optimizer: Any) -> None:
        model, own = made if isinstance(made, tuple) else (made, None)
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"make_model must return a torch module, got {model!r:.100}")
        self._model = model.train()
        self._inputs, self._targets = batch
        self._loss = loss or _default_loss
        if own is None and optimizer is not None:
            own = optimizer(model)
        self._optimizer = own or torch.optim.Adam(model.parameters(), lr=1e-3)

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
        loss = self._loss(made, self._targets)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return outputs

    def _call(self) -> Any:
        inputs = self._inputs
        if isinstance(inputs, dict):
            return self._model(**inputs)
        return self._model(*inputs) if isinstance(inputs, tuple) else self._model(inputs)


def _default_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if targets.is_floating_point():
        return torch.nn.functional.mse_loss(outputs, targets)
    return torch.nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
