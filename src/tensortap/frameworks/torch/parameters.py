"""The parameters of a torch model, their gradients, and what its optimizers keep of them."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tensortap.frameworks.torch.names import Names
from tensortap.frameworks.torch.seen import seen_of
from tensortap.pipeline.pipeline import pipeline
from tensortap.record import Kind
from tensortap.sources.observer import Observer, never_skipped
from tensortap.sources.outputs import leaves

log = logging.getLogger("tensortap")


class Parameters:
    """Observes parameters at the end of a step, their gradients before they are used up."""

    def __init__(self, root: torch.nn.Module, optimizer: Any, observer: Observer) -> None:
        self.root = root
        self.observer = observer
        self.optimizers = _optimizers(optimizer)
        self._undo: list[Callable[[], object]] = []
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._names: dict[int, str] = {}
        self._shared: dict[str, str] = {}
        self._gradients = _Gradients()
        self._early: dict[str, torch.Tensor] = {}
        self._early_needed = True
        self._stepping = False
        self._taken: list[Any] = []  # a step of an optimizer: None, or whether it was left out
        self._over: list[Any] = [None]  # those of the step that is over

    def attach(self) -> None:
        """Put the hooks in place."""
        self._name_parameters()
        settings = self.observer.settings
        if not (settings.weights and settings.gradients):
            return
        self._gradients.end_step(self._parameters)  # what is there already is no step of ours
        for optimizer in self.optimizers:
            for over, register in (
                (False, optimizer.register_step_pre_hook),
                (True, optimizer.register_step_post_hook),
            ):
                hook = functools.partial(self._on_optimizer_step, over)
                self._undo.append(register(hook).remove)
            self._undo.append(_before_zeroing(optimizer, self._on_zeroing))
        if self.optimizers:
            self.observer.skipped = self._skipped
            return
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and self._wants(Kind.WEIGHT_GRADIENT, name):
                hook = functools.partial(self._on_accumulated, name)
                handle = parameter.register_post_accumulate_grad_hook(hook)
                self._undo.append(handle.remove)

    def detach(self) -> None:
        """Remove every hook."""
        while self._undo:
            self._undo.pop()()
        self.observer.skipped = never_skipped  # the tracker outlives the training
        self._parameters.clear()
        self._gradients.end_step({})
        self._early.clear()

    def _name_parameters(self) -> None:
        """Parameters may come and go: lazy ones, adapters."""
        self._parameters.clear()
        self._names.clear()
        self._shared.clear()
        for name, parameter in Names(self.root).parameters():
            first = self._names.setdefault(id(parameter), name)
            if first == name:
                self._parameters[name] = parameter
            else:
                self._shared[first] = " ".join(filter(None, (self._shared.get(first), name)))

    def _name_of(self, parameter: torch.nn.Parameter, optimizer: Any, place: int) -> str:
        """Its name in the model, or its place in the optimizer if it is none of the model's."""
        number = self.optimizers.index(optimizer)
        return self._names.get(id(parameter)) or f"optimizer{number or ''}.{place}"

    def _wants(self, kind: Kind, name: str) -> bool:
        return self.observer.patterns.wants(kind, name)

    def _tags(self, name: str) -> dict[str, str]:
        shared = self._shared.get(name)
        return {} if shared is None else {"shared": shared}

    # -- gradients -----------------------------------------------------------------------

    def _on_optimizer_step(self, over: bool, optimizer: Any, args: Any, kwargs: Any) -> None:
        """All gradients are there, and nothing has used them up yet."""
        if not over:
            # a GradScaler leaves the step out, or has those that know of it do so themselves
            self._taken.append(getattr(optimizer, "found_inf", None))
        if not self.observer.on or not pipeline.enabled:
            return
        self._stepping = not over
        # a closure computes them within the step: before it they are those of the step before
        closure = any(callable(given) for given in (*args[1:], *kwargs.values()))
        if closure is not over:
            return
        for place, parameter in enumerate(_parameters_of(optimizer)):
            if parameter.grad is not None:
                name = self._name_of(parameter, optimizer, place)
                self._observe_gradient(name, parameter.grad)

    def _skipped(self) -> bool:
        """Whether no optimizer has changed anything in the step that is over."""
        return all(left_out is not None and bool(left_out) for left_out in self._over)

    def _on_zeroing(self, optimizer: Any) -> None:
        """They are about to go: those that no optimizer has used, as when a step is skipped."""
        if not self.observer.on or not pipeline.enabled or self._stepping:
            return  # within a step it is a closure that begins anew
        for place, parameter in enumerate(_parameters_of(optimizer)):
            name = self._name_of(parameter, optimizer, place)
            if parameter.grad is not None and self._gradients.unseen(name, parameter.grad):
                self._observe_gradient(name, parameter.grad)

    def _on_accumulated(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Without an optimizer nobody says when gradients are complete, or that they are gone."""
        if not self.observer.on or not pipeline.enabled or parameter.grad is None:
            return
        try:
            self._gradients.accumulated(name, parameter.grad)
            if self._early_needed:
                self._early[name] = parameter.grad.detach().clone()
        except Exception as error:
            pipeline.fault(name, error)

    def _observe_gradient(self, name: str, gradient: torch.Tensor) -> None:
        if not self._wants(Kind.WEIGHT_GRADIENT, name):
            return
        try:
            call = self._gradients.seen(name, gradient)
            self._observe(name, Kind.WEIGHT_GRADIENT, gradient, call, self._tags(name))
        except Exception as error:
            pipeline.fault(name, error)

    def _late_gradients(self) -> None:
        """Gradients that no step of an optimizer has shown: as they are now, or were last."""
        gone = 0
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if not self._gradients.lacks(name):
                continue
            if self._gradients.is_gone(name, gradient):
                gone += 1
                gradient = self._early.get(name)
            elif gradient is None or not self._gradients.unseen(name, gradient):
                continue
            if gradient is not None:
                self._observe_gradient(name, gradient)
        if gone and not self._early:
            log.warning(
                "tensortap: %d gradients were gone before tracker.step(); from the next step on "
                "they are taken as they are computed. track(model, optimizer=...) avoids this",
                gone,
            )
        # still there when the step ends: no need to keep copies
        self._early_needed = bool(gone)

    # -- the end of a step ---------------------------------------------------------------

    def end_step(self) -> None:
        """Observe what is there once the optimizer has done its work."""
        self._over, self._taken = self._taken, []
        settings = self.observer.settings
        if self.observer.on and pipeline.enabled:
            self._name_parameters()
            if settings.weights and settings.gradients:
                self._late_gradients()
            if settings.weights:
                self._observe_weights()
            if settings.optimizer_state:
                self._observe_state()
        self._gradients.end_step(self._parameters)
        self._early.clear()

    def _observe_weights(self) -> None:
        for name, parameter in self._parameters.items():
            if self._wants(Kind.WEIGHT, name):
                self._guarded(name, Kind.WEIGHT, parameter, self._tags(name))

    def _observe_state(self) -> None:
        for optimizer in self.optimizers:
            for place, parameter in enumerate(_parameters_of(optimizer)):
                state = optimizer.state.get(parameter)
                if not state:
                    continue
                name = self._name_of(parameter, optimizer, place)
                for key, value in state.items():
                    label = f"{name}.{key}"
                    if not self._wants(Kind.OPTIMISER_STATE, label):
                        continue
                    tags = {"state": str(key), "parameter": name, **self._tags(name)}
                    if isinstance(value, (int, float)):
                        value = torch.tensor(value, dtype=torch.float64)
                    for path, tensor in leaves(value, torch.Tensor):
                        self._guarded(label + path, Kind.OPTIMISER_STATE, tensor, tags)

    def _guarded(self, name: str, kind: Kind, tensor: torch.Tensor, tags: dict[str, str]) -> None:
        try:
            self._observe(name, kind, tensor, 0, tags)
        except Exception as error:
            pipeline.fault(name, error)

    def _observe(
        self, name: str, kind: Kind, tensor: torch.Tensor, call: int, tags: dict[str, str]
    ) -> None:
        self.observer.observe(*seen_of(name, kind, tensor, call, tags=tags))


class _Gradients:
    """Which gradients of this step have been observed, and which are left over from the last."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}
        self._accumulated: dict[str, int] = {}  # the version of each when it was last added to
        self._known: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}

    def end_step(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        """What is there now is this step's; the next one's are others, or changed."""
        self._calls.clear()
        self._accumulated.clear()
        self._known.clear()
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                self._known[name] = (weakref.ref(parameter.grad), parameter.grad._version)

    def accumulated(self, name: str, gradient: torch.Tensor) -> None:
        """A gradient was computed."""
        self._accumulated[name] = gradient._version

    def seen(self, name: str, gradient: torch.Tensor) -> int:
        """A gradient is being observed; the how-manieth of its name in this step."""
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        self._known[name] = (weakref.ref(gradient), gradient._version)
        return call

    def lacks(self, name: str) -> bool:
        """Whether none has been observed in this step."""
        return name not in self._calls

    def unseen(self, name: str, gradient: torch.Tensor) -> bool:
        """Whether this is another gradient, or another value of it, than what was seen last."""
        known = self._known.get(name)
        return known is None or known[1] != gradient._version or known[0]() is not gradient

    def is_gone(self, name: str, gradient: torch.Tensor | None) -> bool:
        """Whether it was computed in this step, and has been set to None or zero since."""
        version = self._accumulated.get(name)
        if version is None:
            return False
        if gradient is None:
            return True
        return bool(gradient._version != version and not gradient.any())


def _before_zeroing(optimizer: Any, look: Callable[[Any], None]) -> Callable[[], None]:
    """Look at the gradients whenever an optimizer is about to set them to zero; undone by the call.

    Optimizers have hooks for their step, none for this.
    """
    own = vars(optimizer).get("zero_grad")
    zero = optimizer.zero_grad

    @functools.wraps(zero)
    def zero_grad(*args: Any, **kwargs: Any) -> Any:
        look(optimizer)
        return zero(*args, **kwargs)

    def undo() -> None:
        if vars(optimizer).get("zero_grad") is zero_grad:
            del optimizer.zero_grad
            if own is not None:
                optimizer.zero_grad = own

    optimizer.zero_grad = zero_grad
    return undo


def _optimizers(optimizer: Any) -> list[Any]:
    found = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    for each in found:
        if each is not None and not hasattr(each, "param_groups"):
            raise TypeError(f"optimizer is a torch optimizer, or a list of them, not {each!r}")
    return [each for each in found if each is not None]


def _parameters_of(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]
