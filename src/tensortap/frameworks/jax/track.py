"""What a JAX program computes, observed: inside the functions it calls, and in its states."""

from __future__ import annotations

import logging
from typing import Any

import jax

from tensortap.frameworks.jax.intercept import Intercept, Observation
from tensortap.frameworks.protocol import PendingSummary
from tensortap.pipeline.pipeline import pipeline
from tensortap.record import Kind
from tensortap.sources.observer import Observer, Seen

log = logging.getLogger("tensortap")


class JaxStates:
    """Parameters, optimizer state and gradients of a JAX program, and what it intercepts."""

    def __init__(self, model_state: Any, optimizer_state: Any, observer: Observer) -> None:
        settings = observer.settings
        self.observer = observer
        self._like = model_state
        self._intercept = Intercept(self._wants)
        self._calls: dict[tuple[Kind, str], int] = {}
        self._said = 0
        # what `step` is given, in this order
        self._slots = [
            name
            for name, tracked in (
                ("model_state", settings.weights and model_state is not None),
                ("optimizer_state", settings.optimizer_state and optimizer_state is not None),
                ("grads", settings.gradients and settings.weights),
            )
            if tracked
        ]
        if settings.stash is not None or settings.tensors:
            observer.unseen["inside compiled functions"] = (
                "stash and tensors see states only; for others, tap.catch inside the function"
            )

    def _wants(self, kind: Kind, name: str) -> bool:
        settings = self.observer.settings
        if kind is Kind.ACTIVATION and not settings.activations:
            return False
        if kind is Kind.GRADIENT and not settings.gradients:
            return False
        return self.observer.patterns.wants(kind, name)

    def attach(self) -> None:
        """Nothing hangs on anything of the user's."""

    def detach(self) -> None:
        """Nothing hangs on anything of the user's."""

    def intercept(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """What the function returns; what happens inside becomes records."""
        if not self.observer.on or not pipeline.enabled:
            return function(*args, **kwargs)
        results, found = self._intercept(function, *args, **kwargs)
        try:
            self._take(found)
            self._say_unseen()
        except Exception as error:
            pipeline.fault(getattr(function, "__name__", "intercept"), error)
        return results

    def _take(self, found: list[Observation]) -> None:
        calls = dict(self._calls)
        for one in found:
            name = f"{one.name}[{one.part}]" if one.part else one.name
            key = one.kind, name
            call = one.call + self._calls.get(key, 0)
            calls[key] = max(calls.get(key, 0), call + 1)
            self._add(Seen(name, one.kind, call, one.type, one.dtype, one.shape), one)
        self._calls = calls

    def _add(self, seen: Seen, one: Observation) -> None:
        self.observer.add(seen, None, PendingSummary(one.vector.ready, one.resolve), one.array)

    def _say_unseen(self) -> None:
        for reason in self._intercept.unseen[self._said :]:
            self.observer.unseen[reason] = "it could not be intercepted"
            log.warning("tensortap: not everything is seen: %s", reason)
        self._said = len(self._intercept.unseen)

    def end_step(self, *given: Any, **named: Any) -> None:
        """Observe the states that the step has left."""
        if len(given) > len(self._slots):
            slots = ", ".join(self._slots) or "nothing"
            raise TypeError(f"tracker.step takes {slots} here, and numbers by name")
        states = {**dict(zip(self._slots, given, strict=False)), **named}
        unknown = set(states) - set(self._slots)
        if unknown:
            raise TypeError(f"{', '.join(unknown)} is not tracked")
        self._calls.clear()
        if not self.observer.on or not pipeline.enabled or not states:
            return
        found = self._intercept.observe_trees(
            states.get("model_state"), states.get("optimizer_state"), states.get("grads"),
            like=self._like,
        )  # fmt: skip
        with jax.transfer_guard("allow"):  # the user's guard is meant for his own transfers
            for one in found:
                name, tags = one.name, {}
                if one.kind is Kind.OPTIMISER_STATE:
                    tags = {"state": one.part, "parameter": one.name}
                    name = f"{one.name}.{one.part}" if one.name else one.part
                self._add(Seen(name, one.kind, 0, "", one.dtype, one.shape, None, tags), one)
