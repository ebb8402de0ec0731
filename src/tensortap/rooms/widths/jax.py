"""Training of a flax model on one batch, for `tap.rooms.widths.coord_check`."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from tensortap.rooms.track.jax.modules import module_outputs
from tensortap.rooms.widths.coordinates import WidthTask


def own_random_state() -> contextlib.AbstractContextManager[Any]:
    """Give a function that does nothing: a training makes its key from the seed of its task."""
    return contextlib.nullcontext(lambda seed: None)


def width_training(model: Any, optimizer: Any, task: WidthTask) -> FlaxWidthTraining | None:
    """Return the training of a module of linen or nnx; None for anything else."""
    linen, nnx = sys.modules.get("flax.linen"), sys.modules.get("flax.nnx")
    if linen is not None and isinstance(model, linen.Module):
        variables = model.init(jax.random.key(task.seed), *_positional(task.inputs))
        rest = {name: each for name, each in variables.items() if name != "params"}

        def apply(params: Any, *inputs: Any) -> Any:
            return model.apply({"params": params, **rest}, *inputs)

        return FlaxWidthTraining(apply, variables["params"], optimizer, task)
    if nnx is not None and isinstance(model, nnx.Module):
        graph, params, others = nnx.split(model, nnx.Param, ...)

        def call(params: Any, *inputs: Any) -> Any:
            return nnx.merge(graph, params, others)(*inputs)

        return FlaxWidthTraining(call, params, optimizer, task)
    return None


class FlaxWidthTraining:
    """A function of parameters and inputs, its optimizer and the batch."""

    def __init__(self, apply: Any, params: Any, optimizer: Any, task: WidthTask) -> None:
        import optax

        self._apply = apply
        self._params = params
        self._inputs = _positional(task.inputs)
        chosen = optimizer or task.optimizer or optax.adam(1e-3)
        self._state = chosen.init(params)
        loss_of = task.loss or _default_loss

        def update(params: Any, state: Any) -> tuple[Any, Any]:
            def loss(params: Any) -> Any:
                return loss_of(apply(params, *self._inputs), task.targets)

            updates, state = chosen.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        self._update = jax.jit(update)

    def step(self) -> dict[str, NDArray[Any]]:
        """Train for one step; return the outputs of all modules before the update, by name."""
        found = module_outputs(self._apply, self._params, *self._inputs)
        self._params, self._state = self._update(self._params, self._state)
        return {
            name: np.asarray(value, np.float64)
            for name, value in found.items()
            if jnp.issubdtype(value.dtype, jnp.floating)
        }


def _positional(inputs: Any) -> tuple[Any, ...]:
    return inputs if isinstance(inputs, tuple) else (inputs,)


def _default_loss(outputs: Any, targets: Any) -> Any:
    if jnp.issubdtype(targets.dtype, jnp.floating):
        return jnp.mean((outputs - targets) ** 2)
    scores = jax.nn.log_softmax(outputs)
    return -jnp.mean(jnp.take_along_axis(scores, targets[..., None], axis=-1))
