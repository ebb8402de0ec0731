"""Hooks that track a torch model: its modules' outputs, its parameters, its optimizers."""

from __future__ import annotations

import functools
import logging
import math
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tensortap.core.record import Kind
from tensortap.rooms.track.budget import Budget
from tensortap.rooms.track.observer import Observer
from tensortap.rooms.track.observing import Observed, tensors_in
from tensortap.rooms.track.torch.descriptions import Descriptions
from tensortap.rooms.track.torch.hooks import BreakingHook
from tensortap.rooms.track.torch.layouts import UNKNOWN, tensor_mesh
from tensortap.rooms.track.torch.names import Names
from tensortap.rooms.track.torch.optimizers import (
    FoundOptimizer,
    before_zero_grad,
    find_optimizers,
    hook_step,
    parameters_of,
    zeroes_itself,
)
from tensortap.rooms.track.torch.outputs import OutputHooks
from tensortap.rooms.track.torch.reading import sum_of_squares
from tensortap.values.torch.private import version_of
from tensortap.values.torch.tensors import has_values

log = logging.getLogger("tensortap")
_now = time.perf_counter_ns
_IN_GRAPH = 6_000  # nanoseconds of an operator in a compiled graph, which a budget pays for
_NO_NORM = "the norm of all gradients is not computed in each step: not all are floats on the CPU"
_LAZY = "a lazy module has no weights before its first call, so the initial ones are not seen"
_COPIES = (
    "the optimizer trains copies of the weights and takes their gradients away: recorded are those "
    "of the copies, such as {}"
)


def hooks_of(model: Any, optimizer: Any, observer: Observer) -> ModelHooks | None:
    """Return hooks that track a torch model; None for anything else."""
    is_module = isinstance(model, torch.nn.Module)
    return ModelHooks(model, optimizer, observer) if is_module else None


class TrackedModule(NamedTuple):
    """A model that is tracked, as listeners get it."""

    root: torch.nn.Module
    optimizers: Sequence[FoundOptimizer]
    # returns the parameters by name, shared ones once; looking them up again takes time
    parameters: Callable[[bool], Mapping[str, torch.nn.Parameter]]
    uncalled: Callable[[], set[str]]  # names of modules that have not been called yet


class ModelHooks:
    """Hooks on a model and its optimizers."""

    def __init__(self, root: torch.nn.Module, optimizer: Any, observer: Observer) -> None:
        self._observer = observer
        self._outputs = OutputHooks(root, observer)
        self._parameters = ParameterHooks(root, optimizer, observer)
        tracked = TrackedModule(
            root, self._parameters.optimizers, self._parameters.named, self._outputs.uncalled_names
        )
        self._listening = [each.hooks(tracked) for each in observer.listeners]
        self._idle = False  # whether hooks are those of a step that looks at nothing

    def attach(self) -> None:
        self._idle = False
        self._outputs.attach()
        self._parameters.attach()
        for hooks in self._listening:
            self._guarded(hooks.attach)

    @property
    def names(self) -> Iterator[tuple[Kind, str]]:
        """Yield what can be looked at; another thread may ask for it, attached or not."""
        for name in self._outputs.modules():
            yield from ((Kind.ACTIVATION, name), (Kind.GRADIENT, name))
        yield from self._parameters.names

    @property
    def in_graphs(self) -> bool:
        """Return whether hooks were compiled into graphs."""
        return self._outputs.in_graphs

    @property
    def is_compiled(self) -> bool:
        """Return whether new hooks make torch compile the model anew."""
        return self._outputs.is_compiled

    def select(self, whole: Callable[[Kind, str], bool]) -> None:
        """Hook what this step looks at, and no more."""
        plan = self._observer.plan
        idle = plan.skips
        if idle and self._idle:
            return  # as in the step before
        self._idle = idle
        chosen = [plan.chosen(kind) for kind in (Kind.ACTIVATION, Kind.GRADIENT)]
        names = None if None in chosen else [name for each in chosen for name in each or ()]
        self._outputs.select(whole, names)
        self._parameters.begin_step()

    def detach(self) -> None:
        try:
            self._outputs.detach()
        finally:
            for hooks in reversed(self._listening):
                self._guarded(hooks.detach)
            self._parameters.detach()

    def _guarded(self, look: Callable[[], object]) -> None:
        try:
            look()
        except Exception as error:
            self._observer.fault("training step", error)

    def end_step(self) -> None:
        try:
            if self._outputs.is_hooked:
                self._observer.costs.total += self._outputs.calls_in_graphs * _IN_GRAPH
                self._outputs.calls_in_graphs = 0
                self._outputs.end_step(self._parameters.is_trained)
        finally:
            self._parameters.end_step()
        for hooks in self._listening:
            self._guarded(hooks.end_step)


class ParameterHooks:
    """Observe parameters at the end of a step, and their gradients before they are zeroed."""

    def __init__(self, root: torch.nn.Module, optimizer: Any, observer: Observer) -> None:
        self.root = root
        self.observer = observer
        self.optimizers = find_optimizers(optimizer)
        self._mesh = tensor_mesh(root).tag
        self._undo: list[Callable[[], object]] = []
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._names: dict[int, str] = {}
        self._shared: dict[str, str] = {}
        self._paths: dict[str, int] = {}  # of parameters, and their identities
        self._state_tags: dict[tuple[str, Any], tuple[str, dict[str, str]]] = {}  # after the label
        # parameter names, optimizers and parameters by the names of states, for a budget
        self._state_of: dict[str, tuple[str, Any, torch.nn.Parameter]] = {}
        self._descriptions = Descriptions(detaching=observer.batch is None)
        self._gradients = WeightGradients()
        self._early: dict[str, torch.Tensor] = {}
        self._early_needed = True
        self._stepping = False
        self._copies: str | None = None  # name of a gradient of a parameter that the model lacks
        self._found: list[tuple[Observed, torch.Tensor]] = []  # and not yet handed over
        # for each optimizer step of the current and of the last step: None, or found_inf
        self._found_inf: list[Any] = []
        self._last_found_inf: list[Any] = [None]
        self._ended = False  # whether a step has ended
        self._squares: float | None = None  # the sum of squares of all gradients of this step

    def attach(self) -> None:
        self._name_parameters()
        self._observe_initial()
        if Kind.WEIGHT_GRADIENT not in self.observer.kinds:
            return
        self._gradients.end_step(self._parameters)  # existing gradients belong to no step of ours
        if self.optimizers and self._attach_optimizers():
            self.observer.skipped = self._skipped
            return
        for name, parameter in self._parameters.items():
            if not parameter.requires_grad or not has_values(parameter):
                continue
            if self.observer.could_want(Kind.WEIGHT_GRADIENT, name):
                missed = functools.partial(self.observer.unseen.__setitem__, name)
                hook = BreakingHook(functools.partial(self._on_accumulated, name), missed)
                handle = parameter.register_post_accumulate_grad_hook(hook)
                self._undo.append(handle.remove)

    def _attach_optimizers(self) -> bool:
        """Hook into the optimizers inside all wrappers; return whether all of them take hooks."""
        complete = True
        missed = functools.partial(self.observer.unseen.__setitem__, "optimizer")
        for optimizer, number, wraps in self.optimizers:
            try:
                if not wraps:  # the step of a wrapper calls this one
                    before, after = (
                        functools.partial(self._around_step, number, after)
                        for after in (False, True)
                    )
                    self._undo += hook_step(optimizer, before, after, missed)
                if not wraps or zeroes_itself(optimizer):
                    look = functools.partial(self._before_zero_grad, number)
                    self._undo.append(before_zero_grad(optimizer, look, missed))
            except Exception as error:
                complete = complete and wraps
                if not wraps:
                    self._report_optimizer(optimizer, "takes no hooks", error)
        return complete

    def _report_optimizer(self, optimizer: Any, problem: str, error: Exception) -> None:
        self.observer.unseen["optimizer"] = f"{type(optimizer).__name__} {problem}: {error!r:.100}"

    def _guarded(self, look: Callable[..., object], *args: Any) -> None:
        """Call a hook of an optimizer, whose errors must not reach the training."""
        costs, start = self.observer.costs, _now()
        before = costs.total
        try:
            try:
                look(*args)
            finally:
                if self._found:
                    self._observe_found()
        except Exception as error:
            self.observer.fault("optimizer", error)
        costs.spend(_now() - start - (costs.total - before))

    def detach(self) -> None:
        while self._undo:
            self._guarded(self._undo.pop())
        self.observer.skipped = None  # the observer outlives the training
        self._parameters.clear()
        self._gradients.end_step({})
        self._early.clear()

    def named(self, again: bool = True) -> Mapping[str, torch.nn.Parameter]:
        """Return the parameters by name, shared ones once; looking them up `again` takes time."""
        if again:
            self._name_parameters()
        return self._parameters

    @property
    def names(self) -> Iterator[tuple[Kind, str]]:
        """Yield what can be looked at of parameters."""
        found = list(Names(self.root).parameters())
        for kind in (Kind.WEIGHT, Kind.WEIGHT_GRADIENT):
            yield from ((kind, name) for name, _ in found)
        names = {id(parameter): name for name, parameter in reversed(found)}
        for optimizer, number, wraps in self.optimizers:
            try:
                pairs = [] if wraps else list(enumerate(parameters_of(optimizer)))
                for index, parameter in pairs:
                    name = names.get(id(parameter)) or _foreign_name(number, index)
                    for key in list(optimizer.state.get(parameter) or ()):
                        self._state_of[f"{name}.{key}"] = name, optimizer, parameter
                        yield Kind.OPTIMISER_STATE, f"{name}.{key}"
            except Exception as error:
                self._report_optimizer(optimizer, "has no state that can be read", error)

    def _name_parameters(self) -> None:
        """Look up the parameters again: lazy ones and adapters come and go."""
        paths = {
            path: id(parameter)
            for path, parameter in self.root.named_parameters(remove_duplicate=False)
        }
        if paths == self._paths and "keras" not in sys.modules and self._parameters:
            return
        self._paths = paths
        self._parameters.clear()
        self._names.clear()
        self._shared.clear()
        self._state_tags.clear()
        for name, parameter in Names(self.root).parameters():
            first = self._names.setdefault(id(parameter), name)
            if first == name:
                self._parameters[name] = parameter
            else:
                self._shared[first] = " ".join(filter(None, (self._shared.get(first), name)))

    def _name_of(self, parameter: torch.nn.Parameter, number: int, index: int) -> str:
        """Return the name in the model, or the index in the optimizer for foreign parameters."""
        return self._names.get(id(parameter)) or _foreign_name(number, index)

    def _tags(self, name: str) -> dict[str, str]:
        shared = self._shared.get(name)
        return {} if shared is None else {"shared": shared}

    # -- gradients -----------------------------------------------------------------------

    def _around_step(self, number: int, after: bool, optimizer: Any, *call: Any) -> None:
        observer, budget = self.observer, self.observer.plan.budget
        if not after:
            # a GradScaler skips the step, or sets this for optimizers that skip it themselves
            self._found_inf.append(getattr(optimizer, "__dict__", {}).get("found_inf"))
        if observer.on or (budget is not None and budget.checks):
            self._guarded(self._on_optimizer_step, number, after, optimizer, *call)

    def _before_zero_grad(self, number: int, optimizer: Any) -> None:
        if self.observer.on and not self._stepping:
            # within a step, a closure zeroes the gradients to compute them anew
            self._guarded(self._on_zero_grad, number, optimizer)

    def _on_optimizer_step(
        self, number: int, after: bool, optimizer: Any, args: Any, kwargs: Any
    ) -> None:
        """Observe the gradients when all of them are computed and none is used up."""
        if not after and len(self._found_inf) == 20 * len(self.optimizers) and not self._ended:
            log.warning(
                "tensortap: 20 steps of the optimizer are recorded as one step: "
                "call tracker.step() after each optimizer.step()"
            )
        budget = self.observer.plan.budget
        self._stepping = not after
        # a closure computes the gradients within the step: before it they are the last step's
        closure = any(callable(argument) for argument in (*args[1:], *kwargs.values()))
        if closure is not after:
            return
        if budget is not None and budget.checks:
            self._add_norm(budget, parameters_of(optimizer))
        if not self.observer.capturing or self.observer.plan.chosen(Kind.WEIGHT_GRADIENT) == []:
            return
        for index, parameter in enumerate(parameters_of(optimizer)):
            if parameter.grad is not None:
                name = self._name_of(parameter, number, index)
                self._observe_gradient(name, parameter.grad)
                if id(parameter) not in self._names:
                    self._copies = name

    def _add_norm(self, budget: Budget, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add the gradients of an optimizer to the norm of all, which a budget always sees."""
        start = _now()
        gradients = [each.grad for each in parameters if each.grad is not None]
        found = sum_of_squares(gradients)
        if found is None:
            self.observer.unseen["gradient_norm"] = _NO_NORM
        else:
            self._squares = found + (self._squares or 0.0)
        budget.checked(_now() - start)

    def _skipped(self) -> bool:
        """Return whether no optimizer changed anything in the last step."""
        return all(found is not None and bool(found) for found in self._last_found_inf)

    def _on_zero_grad(self, number: int, optimizer: Any) -> None:
        """Observe gradients that no optimizer has used, as when a step is skipped."""
        if not self.observer.capturing:
            return
        for index, parameter in enumerate(parameters_of(optimizer)):
            name = self._name_of(parameter, number, index)
            if parameter.grad is not None and self._gradients.is_new(name, parameter.grad):
                self._observe_gradient(name, parameter.grad)

    def _on_accumulated(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Note a gradient: without an optimizer, no hook runs before it is zeroed."""
        if not self.observer.capturing or parameter.grad is None:
            return
        try:
            self._gradients.accumulated(name, parameter.grad)
            if self._early_needed:
                self._early[name] = parameter.grad.detach().clone()
        except Exception as error:
            self.observer.fault(name, error)

    def is_trained(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether a parameter has got a gradient in this step."""
        name = self._names.get(id(parameter))
        return name is not None and self._gradients.has(name, parameter.grad)

    def _observe_gradient(self, name: str, gradient: torch.Tensor) -> None:
        if self.observer.wants(Kind.WEIGHT_GRADIENT, name):
            call = self._gradients.count(name, gradient)
            self._observe(name, Kind.WEIGHT_GRADIENT, gradient, self._tags(name), call)

    def _observe_late_gradients(self) -> None:
        """Observe gradients that no optimizer step has shown: as they are, or as they were last."""
        zeroed = 0
        for name, parameter in self._chosen(Kind.WEIGHT_GRADIENT):
            gradient = parameter.grad
            if self._gradients.was_observed(name):
                continue
            if self._gradients.was_zeroed(name, gradient):
                zeroed += 1
                gradient = self._early.get(name)
            elif gradient is None or not self._gradients.is_new(name, gradient):
                continue
            if gradient is not None:
                self._observe_gradient(name, gradient)
        if zeroed and not self._early:
            log.warning(
                "tensortap: %d gradients were zeroed before tracker.step(); from the next step on "
                "they are copied as they are computed. track(model, optimizer=...) avoids this",
                zeroed,
            )
        self._early_needed = bool(zeroed)

    # -- the end of a step ---------------------------------------------------------------

    def end_step(self) -> None:
        self._last_found_inf, self._found_inf, self._ended = self._found_inf, [], True
        self._stepping = False  # also where the step of an optimizer has raised
        if self._squares is not None:
            self.observer.metric("gradient_norm", math.sqrt(self._squares))
            self._squares = None
        if self.observer.capturing:
            try:
                self._look_at_the_end()
            finally:
                self._observe_found()
        if self.observer.plan.budget is None:
            self._gradients.end_step(self._parameters)
        if self._early:
            self._early.clear()

    def begin_step(self) -> None:
        """Note, in a budget, the gradients that this step is to look at, as they are now."""
        if self.observer.plan.budget is not None:
            self._gradients.end_step(dict(self._chosen(Kind.WEIGHT_GRADIENT)))

    def _look_at_the_end(self) -> None:
        kinds, step = self.observer.kinds, self.observer.step_number
        if self.observer.plan.budget is None or step % 64 == 0:
            self._name_parameters()
        if Kind.WEIGHT_GRADIENT in kinds:
            self._observe_late_gradients()
            if self._copies and not any(map(self._gradients.was_observed, self._parameters)):
                self.observer.unseen["weight gradients"] = _COPIES.format(self._copies)
        if Kind.WEIGHT in kinds:
            self._observe_weights({})
        if Kind.OPTIMISER_STATE in kinds:
            chosen = self.observer.plan.chosen(Kind.OPTIMISER_STATE)
            if chosen is None:
                self._observe_state()
            for name, optimizer, parameter in {self._state_of[each] for each in chosen or ()}:
                self._observe_state_of(name, optimizer.state.get(parameter) or {})

    def _observe_weights(self, tags: dict[str, str]) -> None:
        for name, parameter in self._chosen(Kind.WEIGHT):
            if not self.observer.wants(Kind.WEIGHT, name):
                continue
            if not has_values(parameter):
                if torch.nn.parameter.is_lazy(parameter):
                    self.observer.unseen[name] = _LAZY
            else:
                self._observe(name, Kind.WEIGHT, parameter, {**self._tags(name), **tags})
        plain = Names(self.root).plain
        for path, buffer in self.root.named_buffers() if self.observer.inputs else ():
            if has_values(buffer) and self.observer.wants(Kind.WEIGHT, plain(path)):
                self._observe(plain(path), Kind.VALUE, buffer, {**tags, "buffer": "1"})

    def _chosen(self, kind: Kind) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters to look through: all, or those that a budget has chosen."""
        chosen = self.observer.plan.chosen(kind)
        if chosen is None:
            return list(self._parameters.items())
        return [(name, self._parameters[name]) for name in chosen if name in self._parameters]

    def _observe_initial(self) -> None:
        """Observe the weights before the first update, as of the step before it."""
        # in later steps, those of the step before are known
        if self.observer.capturing and self.observer.step_number == 0:
            try:
                self._observe_weights({"initial": "1"})
            finally:
                self._observe_found(step=-1)

    def _observe_state(self) -> None:
        seen: set[int] = set()  # wrappers show the state of what they wrap as their own
        for optimizer, number, wraps in self.optimizers:
            try:
                if id(optimizer.state) not in seen:
                    seen.add(id(optimizer.state))
                    for index, parameter in enumerate(parameters_of(optimizer)):
                        state = optimizer.state.get(parameter) or {}
                        self._observe_state_of(self._name_of(parameter, number, index), state)
            except Exception as error:
                if not wraps:
                    self._report_optimizer(optimizer, "has no state that can be read", error)

    def _observe_state_of(self, name: str, state: Mapping[Any, Any]) -> None:
        for key, value in state.items():
            known = self._state_tags.get((name, key))
            if known is None:
                tags = {"state": str(key), "parameter": name, **self._tags(name)}
                known = self._state_tags[name, key] = f"{name}.{key}", tags
            label, tags = known
            if not self.observer.wants(Kind.OPTIMISER_STATE, label):
                continue
            if isinstance(value, (int, float)):
                value = torch.tensor(value, dtype=torch.float64)
            for path, tensor in tensors_in(value, torch.Tensor):
                self._observe(label + path, Kind.OPTIMISER_STATE, tensor, tags)

    def _observe(
        self, name: str, kind: Kind, tensor: torch.Tensor, tags: dict[str, str], call: int = 0
    ) -> None:
        try:
            if tensor.is_sparse:  # the values of its entries, which optimizers add up like this
                shape = "x".join(map(str, tensor.shape))
                tags = {**tags, "sparse": f"values of a sparse tensor of shape {shape}"}
                tensor = tensor.detach().coalesce().values()
            elif _is_quantized(tensor):
                tags = {**tags, "dequantized": type(tensor).__name__}
                with torch.no_grad():
                    tensor = tensor.dequantize()
            if self._mesh and not hasattr(tensor, "device_mesh"):
                tags = {**tags, "placements": UNKNOWN, "mesh": self._mesh}
            self._found.append(self._descriptions.observed(name, kind, tensor, call, "", tags))
        except Exception as error:
            self.observer.fault(name, error)

    def _observe_found(self, step: int | None = None) -> None:
        """Hand over the tensors that were found, to be summarized together."""
        found, self._found = self._found, []
        self.observer.observe_all(found, step)


def _foreign_name(number: int, index: int) -> str:
    return f"optimizer{number or ''}.{index}"


def _is_quantized(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of a class with a way of its own to dequantize, as torchao's."""
    return getattr(type(tensor), "dequantize", None) is not torch.Tensor.dequantize


class WeightGradients:
    """Tells gradients of this step, observed or not, from those that are left over."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}
        self._accumulated: dict[str, int] = {}  # the version when a gradient was last added to
        self._known: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}

    def end_step(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        """Forget this step; gradients that exist now are not new in the next one."""
        self._calls.clear()
        self._accumulated.clear()
        self._known.clear()
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                self._known[name] = (weakref.ref(parameter.grad), version_of(parameter.grad))

    def accumulated(self, name: str, gradient: torch.Tensor) -> None:
        """Note that a gradient was computed."""
        self._accumulated[name] = version_of(gradient)

    def count(self, name: str, gradient: torch.Tensor) -> int:
        """Note that a gradient is observed; return its index within the step."""
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        self._known[name] = (weakref.ref(gradient), version_of(gradient))
        return call

    def was_observed(self, name: str) -> bool:
        """Return whether a gradient of this name was observed in this step."""
        return name in self._calls

    def has(self, name: str, gradient: torch.Tensor | None) -> bool:
        """Return whether a gradient of this name was computed in this step, as far as is known."""
        computed = name in self._calls or name in self._accumulated
        return computed or (gradient is not None and self.is_new(name, gradient))

    def is_new(self, name: str, gradient: torch.Tensor) -> bool:
        """Return whether this is another gradient, or another value, than the last known one."""
        known = self._known.get(name)
        return known is None or known[1] != version_of(gradient) or known[0]() is not gradient

    def was_zeroed(self, name: str, gradient: torch.Tensor | None) -> bool:
        """Return whether a gradient was computed in this step and then set to None or zero."""
        version = self._accumulated.get(name)
        if version is None:
            return False
        if gradient is None:
            return True
        return bool(version_of(gradient) != version and not gradient.any())
