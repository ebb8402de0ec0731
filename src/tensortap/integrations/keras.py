"""Callback for Keras 3 on torch and on JAX: ``model.fit(..., callbacks=[Track(every=10)])``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.errors import MissingExtra
from tensortap.integrations.training import TrackCallback, guarded

if TYPE_CHECKING:
    from keras import config, ops

    Callback = object
else:
    try:
        from keras import config, ops
        from keras.callbacks import Callback
    except ImportError as error:
        raise MissingExtra(
            f"the Keras callback needs Keras 3: pip install keras ({error})"
        ) from error

_STEP = "step_function"  # the variable in which a train function of Keras on JAX has its step


class KerasTrack(TrackCallback, Callback):
    """Track the model that ``fit`` trains, and its optimizer.

    The options are those of `tap.track`. With `run`, each training opens a run below that folder
    and finishes it at its end. A step is one batch, numbered as ``optimizer.iterations`` when it
    begins. Metrics are those that Keras shows: averages over the epoch so far, and at the end of
    an epoch those of the validation. An alert with ``on_alert="stop"`` sets
    ``model.stop_training``. `tracker` is available once the training has begun.

    Keras does not report exceptions to its callbacks: the next training removes the hooks then, or
    ``track.close()``.
    """

    model: Any  # of Keras's Callback, which on JAX puts the state back into the model
    _model: Any  # the same without that

    def __init__(self, *, run: str | Path | None = None, **options: Any) -> None:
        super().__init__(run=run, **options)
        self._undo: list[Callable[[], object]] = []
        self._optimizer: _TorchOptimizer | None = None
        self._step = 0
        self._shown: set[str] = set()  # metrics of batches

    @property
    def async_safe(self) -> bool:
        """True on JAX, where steps are observed from within: Keras need not wait for each."""
        return str(config.backend()) == "jax"

    def close(self) -> None:
        """Stop tracking."""
        self._end()

    @guarded
    def on_train_begin(self, logs: Any = None) -> None:
        """Begin tracking: the model and its optimizer are built."""
        name, model = str(config.backend()), self.model
        self._step = int(ops.convert_to_numpy(model.optimizer.iterations))
        self._shown = set()
        if name == "torch":
            optimizer = _TorchOptimizer(model)
            self._begin(model, optimizer, self._step)
            self._optimizer = optimizer
        elif name == "jax":
            states = _States(model)
            self._begin(None, None, self._step, **states.named(states.current()))
            self._observe_steps(model, states)
        else:
            raise TypeError(f"Keras is tracked on torch and JAX, not on {name}")

    @guarded
    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """End a step on torch."""
        if self._optimizer is not None:
            self._optimizer.step()
            self._finish_step(logs or {}, {})

    @guarded
    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Log the metrics of the epoch at its last step."""
        new = {name: value for name, value in (logs or {}).items() if name not in self._shown}
        self._log(new, self._step - 1)

    @guarded
    def on_train_end(self, logs: Any = None) -> None:
        """Remove the hooks."""
        self._end()

    def _end(self, *error: object) -> None:
        while self._undo:
            self._undo.pop()()
        self._optimizer = None
        super()._end(*error)

    def _finish_step(self, logs: Mapping[str, Any], states: dict[str, Any]) -> None:
        self._shown.update(logs)
        if self.tracker is not None and self.tracker.on:  # reading a number waits for the device
            self._log(logs)
        self._step += 1
        if not self._end_step(**states):
            self._model.stop_training = True

    # -- JAX -----------------------------------------------------------------------------

    def _observe_steps(self, model: Any, states: _States) -> None:
        """Call the compiled step of Keras through the tracker."""
        function = inspect.unwrap(model.train_function)
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if _STEP not in names:
            self._end()
            raise TypeError(
                "nothing is tracked, because make_train_function of this model is not that of "
                "Keras; tap.track and tracker.intercept track a loop of your own"
            )
        cell = function.__closure__[names.index(_STEP)]
        step = cell.cell_contents

        def observed(state: Any, data: Any) -> Any:
            if self.tracker is None or not self._active:
                return step(state, data)
            logs, state = self.tracker.intercept(step, state, data)
            self._after(logs, state, states)
            return logs, state

        cell.cell_contents = observed
        self._undo.append(lambda: setattr(cell, "cell_contents", step))

    @guarded
    def _after(self, logs: Mapping[str, Any], state: Any, states: _States) -> None:
        assert self.tracker is not None
        trees = states.named(state[:3]) if self.tracker.on else {}
        for option, tree in (("weights", "model_state"), ("optimizer_state",) * 2):
            if not self._options.get(option, True):
                trees.pop(tree, None)
        self._finish_step(logs, trees)


class _States:
    """The variables of a model and its optimizer on JAX, as trees that the tracker names."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parts = list(_optimizer_parts(model))

    def current(self) -> list[list[Any]]:
        """Return the values of the variables: trainable, others, and the optimizer's."""
        model = self._model
        groups = model.trainable_variables, model.non_trainable_variables, model.optimizer.variables
        return [[variable.value for variable in group] for group in groups]

    def named(self, values: Any) -> dict[str, Any]:
        """Return the trees of values in this order."""
        trainable, others, optimizer = values
        weights = [*self._model.trainable_variables, *self._model.non_trainable_variables]
        state: dict[str, Any] = {}
        for (part, parameter, _), value in zip(self._parts, optimizer, strict=True):
            if parameter is None:
                state[part] = value
            else:
                state.setdefault(part, {})[_name(parameter)] = value
        model = dict(zip(map(_name, weights), [*trainable, *others], strict=True))
        return {"model_state": model, "optimizer_state": state}


# -- names -----------------------------------------------------------------------------------


def _name(variable: Any) -> str:
    return str(variable.path).replace("/", ".")


def _optimizer_parts(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the variables of an optimizer: its part of the state, the parameter, the variable.

    Keras names them after the path of the parameter, which is None for step counters and the like.
    """
    parameters = {f"{v.path.replace('/', '_')}_": v for v in model.trainable_variables}
    for variable in model.optimizer.variables:
        owner = max((p for p in parameters if variable.name.startswith(p)), key=len, default="")
        yield variable.name[len(owner) :], parameters.get(owner), variable


class _TorchOptimizer:
    """The optimizer of a Keras model on torch, with what the tracker uses of one of torch."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parts = [part for part in _optimizer_parts(model) if part[1] is not None]
        self._hooks: list[Callable[..., object]] = []

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{"params": [variable.value for variable in self._model.trainable_variables]}]

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        state: dict[Any, dict[str, Any]] = {}
        for part, parameter, variable in self._parts:
            state.setdefault(parameter.value, {})[part] = variable.value
        return state

    def register_step_pre_hook(self, hook: Callable[..., object]) -> _TorchOptimizer:
        """Call `hook` when a step ends, while the gradients exist."""
        self._hooks.append(hook)
        return self

    def register_step_post_hook(self, hook: Callable[..., object]) -> _TorchOptimizer:
        """Take a hook that has nothing to see."""
        return self

    def remove(self) -> None:
        """Remove all hooks."""
        self._hooks.clear()

    def zero_grad(self) -> None:
        """Do nothing: the model zeroes the gradients."""

    def step(self) -> None:
        """Call the hooks."""
        for hook in self._hooks:
            hook(self, (), {})


Track = KerasTrack
