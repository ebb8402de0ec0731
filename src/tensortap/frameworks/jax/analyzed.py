"""Tell analyses what happens between two states of a JAX program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from tensortap.frameworks.analyzing import (
    ModelFacts,
    ModuleOutput,
    OutputArray,
    StepListener,
    TrainedParameter,
    TrainedParameters,
)
from tensortap.frameworks.jax.attention import AttentionSample
from tensortap.frameworks.observing import TrackObserver
from tensortap.record import Kind

_NOT_HERE = "parameters on a device, and those of several devices, are not analyzed"
_TORCH_ONLY = frozenset({"noise", "experts"})
_DONATED = "no updates: the weights before the step were donated to it"


class StateAnalysis:
    """Compares the parameters that `tracker.step` gets with those of the last time."""

    def __init__(
        self,
        params: Any,
        observer: TrackObserver,
        listener: StepListener,
        named: Callable[[Any], Iterable[tuple[str, Any]]],
    ) -> None:
        self._observer, self._listener, self._named = observer, listener, named
        self._last = params

    def attach(self) -> None:
        self._listener.attach(ModelFacts(None, ""))
        for family in _TORCH_ONLY.intersection(self._listener.families):
            self._observer.unseen[family] = "not analyzed in JAX programs"

    def detach(self) -> None:
        self._last = None
        self._listener.detach()

    def take_samples(self, found: Iterable[tuple[str, Any, Any]]) -> None:
        """Tell what intercepted functions have computed: logits of attention, and outputs."""
        calls: dict[str, int] = {}
        for name, sample, words in found:
            if isinstance(sample, AttentionSample):
                self._listener.attention(name, sample.logits(words))
                continue
            call = calls[name] = calls.get(name, -1) + 1
            arrays = (OutputArray(name, sample.matrix(words), -1),)
            self._listener.output(ModuleOutput(name, None, call, arrays))

    def end_step(self, params: Any, grads: Any) -> None:
        """Tell what the step did, if it is observed; the gradients are those of the program."""
        last, self._last = self._last, params
        if not self._observer.capturing:
            return
        with jax.transfer_guard("allow"):  # the user's guard is not meant for us
            gradients, old, new = map(self._arrays, (grads, last, params))
        if new and last is not None and not old:
            self._observer.unseen["updates"] = _DONATED
        self._listener.after_backward(_together(gradients, gradients))
        self._listener.before_update(_together(old, {}))
        self._listener.after_update(_together(new, gradients))
        self._listener.end_step()

    def _arrays(self, tree: Any) -> dict[str, Any]:
        """Return the arrays of a tree by name, as far as the host can read them."""
        found = {}
        for name, array in self._named(tree):
            if not self._observer.wants(Kind.HEALTH, name):
                continue
            if isinstance(array, jax.Array) and (
                len(array.devices()) > 1 or array.device.platform != "cpu"
            ):
                self._observer.unseen["analyses"] = _NOT_HERE
                continue
            found[name] = np.asarray(array)
        return found


def _together(values: Mapping[str, Any], gradients: Mapping[str, Any]) -> TrainedParameters:
    return TrainedParameters(
        TrainedParameter(name, value, gradients.get(name)) for name, value in values.items()
    )
