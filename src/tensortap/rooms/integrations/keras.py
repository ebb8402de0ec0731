"""Callback for Keras 3 on torch: ``model.fit(..., callbacks=[Track(every=10)])``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.core.errors import MissingExtra, TensortapError
from tensortap.rooms.integrations.training import TrackCallback, guarded

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


class KerasTrack(TrackCallback, Callback):
    """Track the model that ``fit`` trains, and its optimizer; see `TrackCallback` for the options.

    A step is one batch, numbered as ``optimizer.iterations`` when it begins. Metrics are those that
    Keras shows: averages over the epoch so far, and at the end of an epoch those of the validation.
    Keras does not report exceptions: the next training removes the hooks then, or `close`.
    """

    model: Any  # of Keras's Callback

    def __init__(self, *, run: str | Path | None = None, **options: Any) -> None:
        if config.backend() != "torch":
            raise TensortapError(
                f"the Keras callback needs the torch backend, this is {config.backend()}: set "
                "KERAS_BACKEND=torch, or track a training loop of your own with tap.track"
            )
        super().__init__(run=run, **options)
        self._optimizer: _TorchOptimizer | None = None
        self._step = 0
        self._shown: set[str] = set()  # metrics of batches

    @guarded
    def on_train_begin(self, logs: Any = None) -> None:
        """Begin tracking: the model and its optimizer are built."""
        self._step = int(ops.convert_to_numpy(self.model.optimizer.iterations))
        self._shown = set()
        optimizer = _TorchOptimizer(self.model)
        self._begin(self.model, optimizer, self._step)
        self._optimizer = optimizer

    @guarded
    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._optimizer is None or not self._active:
            return
        self._optimizer.step()
        self._shown.update(logs or {})
        if self.tracker is not None and self.tracker.on:  # reading a number waits for the device
            self._log(logs or {})
        self._step += 1
        if not self._end_step():
            self.model.stop_training = True

    @guarded
    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Log the metrics of the epoch at its last step."""
        new = {name: value for name, value in (logs or {}).items() if name not in self._shown}
        self._log(new, self._step - 1)

    @guarded
    def on_train_end(self, logs: Any = None) -> None:
        self._end()


class _TorchOptimizer:
    """The optimizer of a Keras model on torch, with what the tracker uses of one of torch."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._hooks: list[Callable[..., object]] = []
        # Keras names the variables of an optimizer after the path of the parameter
        parameters = {f"{v.path.replace('/', '_')}_": v for v in model.trainable_variables}
        self._parts: list[tuple[str, Any, Any]] = []  # part of the state, parameter, variable
        for variable in model.optimizer.variables:
            owners = [name for name in parameters if variable.name.startswith(name)]
            if owners:  # others are counters of steps and the like
                owner = max(owners, key=len)
                self._parts.append((variable.name[len(owner) :], parameters[owner], variable))

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
        self._hooks.clear()

    def zero_grad(self) -> None:
        """Do nothing: the model zeroes the gradients."""

    def step(self) -> None:
        for hook in self._hooks:
            hook(self, (), {})


Track = KerasTrack
