"""Tracking a JAX program: what happens inside its functions, and its states."""

from __future__ import annotations

from typing import Any

import jax

from tensortap.frameworks.jax.intercept import Intercept
from tensortap.frameworks.jax.observation import Observation
from tensortap.frameworks.jax.trees import observe_trees
from tensortap.frameworks.observing import Observed, TrackObserver
from tensortap.frameworks.protocol import PendingSummary
from tensortap.record import Kind


class JaxTracking:
    """Observes intercepted functions, and parameters, optimizer state and gradients."""

    def __init__(self, model_state: Any, optimizer_state: Any, observer: TrackObserver) -> None:
        self.observer = observer
        self._like = model_state
        self._intercept = Intercept(observer.wants, observer.fault)
        self._calls: dict[tuple[Kind, str], int] = {}
        # the arguments of `step`, in this order
        self._states = [
            name
            for name, kind, given in (
                ("model_state", Kind.WEIGHT, model_state is not None),
                ("optimizer_state", Kind.OPTIMISER_STATE, optimizer_state is not None),
                ("grads", Kind.WEIGHT_GRADIENT, True),
            )
            if kind in observer.kinds and given
        ]

    def attach(self) -> None:
        """Do nothing: functions are observed only when `intercept` calls them."""

    def detach(self) -> None:
        """Do nothing, as `attach` does."""

    def intercept(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the results of a function and record what its modules compute."""
        if not self.observer.capturing:
            return function(*args, **kwargs)
        results, observations = self._intercept(function, *args, **kwargs)
        try:
            self._record(observations)
            self.observer.unseen.update(self._intercept.unseen)
        except Exception as error:
            self.observer.fault(getattr(function, "__name__", "intercept"), error)
        return results

    def _record(self, observations: list[Observation]) -> None:
        calls = dict(self._calls)
        for each in observations:
            name = f"{each.name}[{each.part}]" if each.part else each.name
            key = each.kind, name
            call = each.call + self._calls.get(key, 0)
            calls[key] = max(calls.get(key, 0), call + 1)
            self._add(Observed(name, each.kind, call, each.type, each.dtype, each.shape), each)
        self._calls = calls

    def _add(self, seen: Observed, observation: Observation) -> None:
        pending = PendingSummary(observation.vector.ready, observation.resolve)
        self.observer.add(seen, None, pending, observation.array)

    def end_step(self, *states: Any, **named: Any) -> None:
        """Record the states after a step."""
        if len(states) > len(self._states):
            expected = ", ".join(self._states) or "no states"
            raise TypeError(f"tracker.step takes {expected} here, and metrics as keyword arguments")
        given = {**dict(zip(self._states, states, strict=False)), **named}
        unknown = set(given) - set(self._states)
        if unknown:
            raise TypeError(f"{', '.join(unknown)} is not tracked")
        self._calls.clear()
        if not self.observer.capturing or not given:
            return
        observations = observe_trees(
            self.observer.wants,
            given.get("model_state"),
            given.get("optimizer_state"),
            given.get("grads"),
            like=self._like,
        )
        with jax.transfer_guard("allow"):  # the user's guard is not meant for us
            for each in observations:
                name, tags = each.name, {}
                if each.kind is Kind.OPTIMISER_STATE:
                    tags = {"state": each.part, "parameter": each.name}
                    name = f"{each.name}.{each.part}" if each.name else each.part
                self._add(
                    Observed(name, each.kind, 0, "", each.dtype, each.shape, None, tags), each
                )
