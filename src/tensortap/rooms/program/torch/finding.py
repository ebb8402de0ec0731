"""Find the models that a torch program trains, their losses, and the ends of their steps.

Nothing is searched for: optimizers are noted when they are created, modules when they get
parameters or become parts of others, and losses when `backward` is called on them. A model is
tracked from its first call after an optimizer has got its parameters.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import time
import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch.nn.modules import module as registration
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tensortap.capture.pipeline import pipeline
from tensortap.core.ranks import rank_and_world_size
from tensortap.rooms.health.steps import StepMonitor
from tensortap.rooms.health.torch.losses import on_backward
from tensortap.rooms.track.observer import is_tracking
from tensortap.rooms.track.torch.hooks import BreakingHook, ModuleHook
from tensortap.rooms.track.torch.optimizers import parameters_of
from tensortap.rooms.track.torch.reading import is_plain, sample
from tensortap.rooms.track.track import Tracker, track
from tensortap.values.torch.hidden import hide_from_compiler, replace_when_compiled
from tensortap.values.torch.tensors import quiet

_MOST_RATES = 8  # learning rates of one model that are recorded
_MOST_MODELS = 16  # that are tracked at a time: some programs train a copy for each batch
_MOST_LOSSES = 10_000  # that one step of an optimizer adds up
_MOST_LOOKS = 1000  # outermost calls of modules to look at, for optimizers that nobody uses


class Parts(torch.nn.Module):  # type: ignore[misc]
    """Modules that one optimizer trains and that no other module holds together."""

    def __init__(self, parts: dict[str, torch.nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    @property
    def training(self) -> bool:
        return any(vars(part).get("training") for part in self._modules.values())

    @training.setter
    def training(self, mode: bool) -> None:
        """Ignore the mode that torch sets in each new module: the parts have their own."""


class Modules:
    """The modules of the program, and which of them are parts of which."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, list[Any]]] = {}  # id → weak: a module, and its parents
        self.version = 0  # of this knowledge

    def attach(self) -> list[Callable[[], None]]:
        handles = [
            registration.register_module_module_registration_hook(self._on_child),
            registration.register_module_parameter_registration_hook(self._on_parameter),
        ]
        return [handle.remove for handle in handles]

    def _on_child(self, parent: torch.nn.Module, name: str, child: Any) -> None:
        if child is not None and not isinstance(parent, Parts):
            self.note(parent)
            self.note(child).append(weakref.ref(parent))
            self.version += 1

    def _on_parameter(self, module: torch.nn.Module, name: str, parameter: Any) -> None:
        self.note(module)

    def on_copy(self, _: None, module: torch.nn.Module, *args: Any) -> None:
        """Remember a module that was copied or loaded; its parts are not remembered."""
        self.note(module)
        for child in _children(module):
            self._on_child(module, "", child)

    def note(self, module: torch.nn.Module) -> list[Any]:
        """Remember a module; return the list of its parents."""
        key = id(module)
        if key not in self._known:
            self.version += 1
            forget = functools.partial(self._known.pop, key)
            self._known[key] = weakref.ref(module, lambda _: forget(None)), []
        return self._known[key][1]

    def _parents(self, module: torch.nn.Module) -> list[torch.nn.Module]:
        living = [parent for ref in self.note(module) if (parent := ref()) is not None]
        return [each for each in living if any(part is module for part in _children(each))]

    def outermost(self, module: torch.nn.Module) -> set[int]:
        """Return the ids of the modules that hold a module and are parts of no other one."""
        found: set[int] = set()
        pending, seen = [module], set()
        while pending:
            if id(each := pending.pop()) not in seen:
                seen.add(id(each))
                parents = self._parents(each)
                pending += parents
                if not parents:
                    found.add(id(each))
        return found

    def models(self) -> list[torch.nn.Module]:
        """Return all modules that are parts of no other one."""
        living = [module for ref, _ in list(self._known.values()) if (module := ref()) is not None]
        inside = {id(part) for each in living for part in _children(each)}
        return [each for each in living if id(each) not in inside]


def _children(module: torch.nn.Module) -> Iterable[Any]:
    return vars(module).get("_modules", {}).values()  # type: ignore[no-any-return]


def _parameters_below(module: torch.nn.Module) -> set[int]:
    """Return the ids of all parameters, without running code of the model."""
    found: set[int] = set()
    pending, seen = [module], set()
    while pending:
        each = pending.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            found.update(map(id, vars(each).get("_parameters", {}).values()))
            pending += _children(each)
    return found - {id(None)}


def _shapes(module: torch.nn.Module) -> tuple[Any, ...]:
    return tuple(each.shape for each in module.parameters())


class _Copy:
    """A module with the parameters of a trained one: an average, a target network, a teacher."""

    def __init__(self, module: torch.nn.Module, name: str, steps: Callable[[], int]) -> None:
        self.name, self._steps = name, steps
        self._calls = 0
        self._last = 0  # the step at which it was last called and had not changed
        self._parameter = weakref.ref(max(module.parameters(), key=torch.Tensor.numel))
        self._before = self._sample()

    def _sample(self) -> torch.Tensor | None:
        parameter = self._parameter()
        with quiet():
            return sample(parameter) if parameter is not None and is_plain(parameter) else None

    def on_call(self, *args: Any) -> None:
        step = self._steps()
        if self._before is None or step <= self._last:
            return
        self._calls += 1
        if self._calls < 10 or self._calls % 10 == 0:
            now = self._sample()
            if now is None or not torch.equal(self._before, now):
                self._before = None
            self._last = step

    @property
    def is_stale(self) -> bool:
        """Whether it is called now and then, also late in training, and never changes."""
        return self._before is not None and self._calls >= 3 and self._last >= 40


class TrainedModel:
    """A model that is tracked, with the optimizers that train it."""

    def __init__(self, tracker: Tracker, keys: set[int], optimizers: list[Optimizer]) -> None:
        self.tracker: Tracker | None = tracker  # None after the end
        self.name = tracker._observer.options.name
        self.keys = keys  # ids of the modules, which the tracker keeps alive
        self.optimizers = optimizers  # in the order of their creation
        self._expected = set(map(id, optimizers))  # those that made the last step
        self._made: set[int] = set()  # those that have made this step
        self._numbers: dict[int, int] = {}  # of their losses
        self._losses: dict[int, float] = {}  # those of this step, by number
        self.metrics: dict[str, Any] = {}  # further ones of this step
        self.steps = self.losses = 0
        self.waiting = 0  # names that had no turn within the budget
        self.norm_period = 1.0  # steps from one norm of all gradients to the next
        self.titles = ""  # of this model, and of those that will be trained beside it
        self.loss = math.nan  # the latest
        self.show: Callable[[TrainedModel], None] | None = None
        self._time = time.perf_counter()
        self.last = 0  # steps of the program until its last one

    def before_step(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._made:  # the others do not step every time
            self._finish_step()

    def after_step(self, optimizer: Optimizer, losses: list[Any]) -> None:
        if losses:
            number = self._numbers.setdefault(id(optimizer), len(self._numbers))
            self._losses[number] = sum(float(loss) for loss in losses)
        self._made.add(id(optimizer))
        if len(self._made) >= len(self._expected) and self._made >= self._expected:
            self._finish_step()

    def _finish_step(self) -> None:
        groups = [group for each in self.optimizers for group in each.param_groups]
        rates = [float(group["lr"]) for group in groups if group.get("lr") is not None]
        if len(set(rates)) == 1:
            del rates[1:]
        metrics, self.metrics = {name: float(each) for name, each in self.metrics.items()}, {}
        metrics |= {_numbered("loss", number): loss for number, loss in self._losses.items()}
        metrics |= {
            _numbered("lr", number): rate for number, rate in enumerate(rates[:_MOST_RATES])
        }
        now = time.perf_counter()
        metrics["steps_per_second"] = 1.0 / max(now - self._time, 1e-9)
        self._time = now
        self.loss = self._losses.get(0, self.loss)
        self.steps += 1
        self.losses += len(self._losses)
        self._losses.clear()
        self._expected, self._made = self._made, set()
        if self.tracker is not None:
            self.tracker.step(**metrics)
        if self.show is not None:
            self.show(self)

    def end(self) -> None:
        if self._made:
            self._finish_step()
        tracker, self.tracker = self.tracker, None
        budget = None if tracker is None else tracker._observer.plan.budget
        if budget is not None:
            self.waiting, self.norm_period = budget.waiting, budget.norm_period
        self.keys, self.optimizers = set(), []
        if tracker is not None:
            tracker.__exit__(None, None, None)


def _numbered(name: str, number: int) -> str:
    return f"{name}[{number}]" if number else name


class TrainedModels:
    """Tracks the models of a program while it is attached."""

    def __init__(self, options: dict[str, Any]) -> None:
        own = "opens", "shows"
        self._options = {name: each for name, each in options.items() if name not in own}
        self._open_run: Callable[[], None] | None = options.get("opens")  # with the first model
        self._show = options.get("shows")  # called with a model when it begins, and at each step
        self._modules = Modules()
        self._undo: list[Callable[[], None]] = []
        # optimizers without a model → how many steps there were when they were created
        self._waiting: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those that have waited
        self._model_of: dict[int, TrainedModel] = {}  # by the id of an optimizer that it keeps
        self._strays: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # they stay without a model
        self._call: Any = None  # the method of modules that is replaced while optimizers wait
        self._looks = 0
        self._groups: list[tuple[set[int], list[Optimizer]]] = []
        self._version = -1  # of what these groups were made from
        self._steps = 0  # of all optimizers
        self._losses: list[Any] = []  # since the last step of an optimizer
        self._norms: list[dict[str, Any]] = []  # by which gradients were clipped, since then
        self._zeroed: dict[int, int] = {}  # ids of optimizers → losses before their `zero_grad`
        self._clips = 0  # in a row that found no gradient
        self._new = 0  # optimizers in a row that made a single step
        self._scaled: tuple[Any, Any] | None = None  # the last scaled loss, weak, and the loss
        self._is_scaled = False  # whether gradients have the scale of a GradScaler
        self.notes: dict[str, str] = {}  # for rules that need more than one model
        self._told: dict[str, set[str]] = {}  # those that one of the models has reported
        self._copies: dict[int, _Copy] = {}  # of trained models, by id
        self._alternate = False  # whether a model was trained again after the next had begun
        self.models: list[TrainedModel] = []
        self.strays = self.untracked = 0
        self.tracks_itself = False
        self.problems: list[str] = []

    def attach(self) -> None:
        """Begin to note what the program creates."""
        before, after = (
            BreakingHook(functools.partial(self._guarded, look), self._on_missed)
            for look in (self._before_step, self._after_step)
        )
        self._undo += [
            *self._modules.attach(),
            register_optimizer_step_pre_hook(before).remove,
            register_optimizer_step_post_hook(after).remove,
        ]
        scaler = torch.amp.GradScaler
        self._wrap(Optimizer, "__init__", after=self._on_optimizer)
        self._wrap(Optimizer, "zero_grad", after=self._on_zero_grad)
        self._undo.append(on_backward(functools.partial(self._guarded, self._on_backward)))
        self._wrap(scaler, "scale", after=self._on_scale)
        self._wrap(scaler, "unscale_", after=self._before_scaler)
        self._wrap(torch.nn.Module, "load_state_dict", after=self._on_load)
        self._wrap(torch.nn.Module, "__setstate__", after=self._modules.on_copy)
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            self._wrap(owner, "clip_grad_norm_", before=self._on_clip, after=self._on_clipped)
        if hasattr(torch.nn.utils, "clip_grads_with_norm_"):  # since torch 2.6
            self._wrap(torch.nn.utils, "clip_grads_with_norm_", after=self._on_norm)
        self._wrap(scaler, "step", before=self._before_scaler, after=self._after_scaler)

    def detach(self) -> None:
        """Put everything back, and end all trackers."""
        self._restore_call()
        while self._undo:
            self._undo.pop()()
        self._guarded(self._check_copies)
        for model in self.models:
            self._guarded(model.end)

    def _wrap(
        self, owner: Any, name: str, *, before: Any = None, after: Callable[..., None] | None = None
    ) -> None:
        """Look at the arguments of a function before it is called, or also at its result."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                self._guarded(before, *args)
            result = original(*args, **kwargs)
            if after is not None:
                self._guarded(after, result, *args, *kwargs.values())
            return result

        hide_from_compiler(wrapped)
        setattr(owner, name, wrapped)
        self._undo.append(functools.partial(setattr, owner, name, original))

    def _guarded(self, look: Callable[..., object], *args: Any) -> None:
        try:
            look(*args)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            if problem not in self.problems:
                self.problems.append(problem)
            pipeline.fault("tensortap run", error, "does not track a model as it should")

    def _on_missed(self, reason: str) -> None:
        if (problem := f"a step of an optimizer was not seen: {reason}") not in self.problems:
            self.problems.append(problem)

    # -- what the program creates and calls ----------------------------------------------------

    def _on_optimizer(self, _: None, optimizer: Optimizer, *args: Any) -> None:
        self._known.add(optimizer)
        self._waiting[optimizer] = self._steps
        self._version = -1
        self._looks = 0
        self._replace_call()

    def _on_zero_grad(self, _: None, optimizer: Optimizer, *args: Any) -> None:
        if self._losses:
            self._zeroed[id(optimizer)] = len(self._losses)

    def _on_backward(self, tensors: Any, *args: Any) -> None:
        if len(self._losses) >= _MOST_LOSSES or not (self.models or self._waiting):
            self._losses.clear()  # no optimizer uses them
        for each in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
            if self._scaled is not None and self._scaled[0]() is each:
                self._losses.append(self._scaled[1])
            elif type(each) is torch.Tensor and each.numel() == 1:
                self._losses.append(_number(each))
        self._scaled = None

    def _on_load(self, result: Any, module: Any, state: Any, *args: Any) -> None:
        if state and len(result.unexpected_keys) == len(state):
            key, own = result.unexpected_keys[0], next(iter(result.missing_keys), "none")
            self.notes["nothing_loaded"] = (
                f"load_state_dict(strict=False) loaded none of {len(state)} tensors: the file has "
                f"{key}, the module has {own}"
            )

    def _on_clip(self, *args: Any) -> None:
        if self._is_scaled:
            self.notes["loss_scaling"] = (
                "gradients are clipped while GradScaler's scale is in them: call "
                "scaler.unscale_(optimizer) before clip_grad_norm_()"
            )

    def _on_clipped(self, norm: Any, parameters: Any, limit: Any = math.nan, *args: Any) -> None:
        self._on_norm(None, parameters, limit, norm)

    def _on_norm(self, _: None, parameters: Any, limit: Any, norm: Any, *args: Any) -> None:
        """Note by which norm gradients are clipped, for a comparison of ranks."""
        if type(norm) is torch.Tensor and norm.is_cpu:
            self._clips = self._clips + 1 if not self._losses and norm == 0.0 else 0
            if self._clips == 3:
                self.notes["clipping"] = (
                    "clip_grad_norm_() is called when there are no gradients, after zero_grad(): "
                    "call it between backward() and step()"
                )
        if rank_and_world_size()[1] > 1 and type(norm) is torch.Tensor:  # of DTensors it is right
            self._norms.append({"clip_norm": _number(norm), "clip_limit": limit})

    def _on_scale(self, scaled: Any, scaler: Any, loss: Any) -> None:
        self._is_scaled = bool(scaler.is_enabled())
        if type(loss) is torch.Tensor and loss.numel() == 1:
            self._scaled = weakref.ref(scaled), _number(loss)

    def _before_scaler(self, *args: Any) -> None:
        self._is_scaled = False
        self._before_scaling = self._steps

    def _after_scaler(self, _: Any, scaler: Any, optimizer: Any, *args: Any) -> None:
        if self._before_scaling == self._steps:  # skipped: there are Inf or NaN in the gradients
            self._before_step(optimizer)
            self._after_step(optimizer)

    # -- models --------------------------------------------------------------------------------

    def _replace_call(self) -> None:
        """Look at the outermost modules that are called, while an optimizer has no model."""
        if self._call is not None:
            return
        self._call = call = torch.nn.Module.__call__

        def first_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._restore_call()  # what it calls are parts of it
            if torch.is_grad_enabled():
                self._guarded(self._on_call, module)
            try:
                return call(module, *args, **kwargs)
            finally:
                if self._waiting and self._looks < _MOST_LOOKS:
                    self._replace_call()

        replace_when_compiled(first_call, call)  # then its first step is looked at
        torch.nn.Module.__call__ = first_call

    def _restore_call(self) -> None:
        if self._call is not None:
            torch.nn.Module.__call__ = self._call
            self._call = None

    def _on_call(self, module: torch.nn.Module) -> None:
        self._looks += 1
        tops = self._modules.outermost(module)
        for keys, optimizers in self._grouped():
            if keys & tops:
                self._track(keys, optimizers)

    def _grouped(self) -> list[tuple[set[int], list[Optimizer]]]:
        """Return waiting optimizers with the ids of their models: those that share one together."""
        if self._version == self._modules.version:
            return self._groups
        self._version = self._modules.version
        owners: dict[int, set[int]] = {}  # ids of parameters → ids of models
        for model in self._modules.models():
            for key in _parameters_below(model):
                owners.setdefault(key, set()).add(id(model))
        self._groups = []
        for optimizer in list(self._waiting):
            held = [owners[id(each)] for each in parameters_of(optimizer) if id(each) in owners]
            keys = set().union(*held)
            optimizers = [optimizer]
            for group in [group for group in self._groups if group[0] & keys]:
                self._groups.remove(group)
                keys |= group[0]
                optimizers = [*group[1], *optimizers]
            if keys:
                self._groups.append((keys, optimizers))
        return self._groups

    def _track(self, keys: set[int], optimizers: list[Optimizer]) -> None:
        born = min(self._waiting.pop(each) for each in optimizers)
        self._version = -1
        name, again = None, False
        for model in [each for each in self.models if each.tracker is not None]:
            if model.keys & keys:  # other optimizers of the same model
                new = {id(each) for one in optimizers for each in parameters_of(one)}
                kept = [o for o in model.optimizers if new.isdisjoint(map(id, parameters_of(o)))]
                keys, optimizers = keys | model.keys, [*kept, *optimizers]
                name, again = model.name, True
                once = model.steps == 1 and any(each.state for each in model.optimizers)
                self._new = self._new + 1 if once else 0
                if self._new == 5:
                    self.notes["new_optimizer"] = (
                        "the optimizer is created anew for each step, so it forgets its momentum "
                        "and averages: create it once, before the loop"
                    )
                self._end(model)
            elif model.steps and model.last <= born and not self._alternate:
                self._end(model)  # such as the last fold: a tracker keeps its model alive
        living = sum(each.tracker is not None for each in self.models)
        if living >= _MOST_MODELS:
            self.untracked += 1
            return
        if is_tracking() and not living:
            self.tracks_itself = True
            return
        if self._open_run is not None:
            open_run, self._open_run = self._open_run, None
            open_run()
        models = [each for each in self._modules.models() if id(each) in keys]
        names = _variables() if self.models or len(models) > 1 else {}
        if self.models and not again:
            name = free_name(
                names.get(id(models[0])) or type(models[0]).__name__,
                {each.name for each in self.models},
            )
        tracker = track(_together(models, names), optimizers, name=name, **self._options)
        tracker.__enter__()
        self.models.append(TrainedModel(tracker, keys, optimizers))
        for listener in tracker._observer.listeners:
            if isinstance(listener, StepMonitor):
                listener.notes, listener.told = self.notes, self._told
        self._model_of.update((id(each), self.models[-1]) for each in optimizers)
        if self._show is not None and rank_and_world_size()[0] == 0:
            all_keys = [keys, *(others for others, _ in self._grouped())]
            self.models[-1].titles = ", ".join(map(self._classes, all_keys))
            self.models[-1].show = self._show
            self._show(self.models[-1])

    def _classes(self, keys: set[int]) -> str:
        return ", ".join(type(each).__name__ for each in self._modules.models() if id(each) in keys)

    def _find_copies(self, model: TrainedModel) -> None:
        """Note modules that no optimizer trains and that have the parameters of a trained one."""
        modules = {id(each): each for each in self._modules.models()}
        trained = set().union(*(each.keys for each in self.models))
        shapes = {_shapes(modules[key]) for key in model.keys if key in modules}
        names = _variables()
        for key, module in modules.items():
            if key not in trained and key not in self._copies and _shapes(module) in shapes:
                name = names.get(key) or type(module).__name__
                self._copies[key] = copy = _Copy(module, name, lambda: self._steps)
                called = functools.partial(self._guarded, copy.on_call)
                handle = module.register_forward_pre_hook(ModuleHook(called))
                self._undo.append(handle.remove)

    def _check_copies(self) -> None:
        for copy in self._copies.values():
            if copy.is_stale:
                self.notes[f"stale_copy {copy.name}"] = (
                    f"{copy.name} has the same layers as the trained model and is called during "
                    "training, but never changes: is this copy (an average, or a target network) "
                    "updated? Ignore this if it is a fixed reference"
                )
        for model in self.models:
            for listener in model.tracker._observer.listeners if model.tracker else ():
                if isinstance(listener, StepMonitor):
                    listener.check_again()

    def _replaced(self, optimizer: Optimizer) -> tuple[set[int], list[Optimizer]] | None:
        """Return the model that has taken the place of the one whose tensors an optimizer has."""
        shapes = tuple(each.shape for each in parameters_of(optimizer))
        for module in self._modules.models():
            gradients = (each.grad is not None for each in module.parameters())
            if shapes and _shapes(module) == shapes and any(gradients):
                return {id(module)}, [optimizer]
        return None

    def _end(self, model: TrainedModel) -> None:
        for each in model.optimizers:
            del self._model_of[id(each)]
        model.end()

    # -- steps ---------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, *args: Any) -> None:
        if self._is_scaled:
            self._is_scaled = False
            self.notes["loss_scaling"] = (
                "optimizer.step() uses gradients that have GradScaler's scale in them: call "
                "scaler.step(optimizer)"
            )
        model = self._model_of.get(id(optimizer))
        if model is None and optimizer not in self._strays:
            if optimizer not in self._waiting:  # a copy, or its model was trained before another
                self._alternate |= optimizer in self._known
                self._waiting[optimizer] = self._steps
                self._version = -1
            group = next((one for one in self._grouped() if optimizer in one[1]), None)
            if all(each.grad is None for each in parameters_of(optimizer)):
                group = self._replaced(optimizer) or group
            if group is not None:
                self._track(*group)
                model = self._model_of.get(id(optimizer))
            else:
                self.strays += 1
                del self._waiting[optimizer]
            if model is None:
                self._strays.add(optimizer)
        if not self._waiting:
            self._restore_call()
        if model is not None:
            model.before_step(optimizer)

    def _after_step(self, optimizer: Optimizer, *args: Any) -> None:
        self._steps += 1
        model = self._model_of.get(id(optimizer))
        if model is not None:
            model.last = self._steps
            if len(self._norms) == 1:  # several are those of parts
                model.metrics |= self._norms[0]
            model.after_step(optimizer, self._losses[self._zeroed.get(id(optimizer), 0) :])
            if model.steps in (2, 20):
                self._find_copies(model)
        self._losses.clear()
        self._norms.clear()
        self._zeroed.clear()


def _number(loss: torch.Tensor) -> Any:
    """Return the value of a loss, or its copy where reading it would wait for a device."""
    with quiet():
        return loss.item() if loss.is_cpu else loss.detach().clone()


def _variables() -> dict[int, str]:
    """Return the names of the global variables that hold modules, by the id of the module.

    Local variables are not looked at: until Python 3.12 that changes what `locals()` has returned.
    """
    found: dict[int, str] = {}
    frame: Any = sys._getframe()
    while frame is not None:
        for name, value in list(frame.f_globals.items()) if frame.f_back else ():
            if issubclass(type(value), torch.nn.Module):
                found[id(value)] = name
        frame = frame.f_back
    return found


def _together(models: list[torch.nn.Module], names: dict[int, str]) -> torch.nn.Module:
    if len(models) == 1:
        return models[0]
    parts: dict[str, torch.nn.Module] = {}
    for each in models:
        parts[free_name(names.get(id(each)) or type(each).__name__, parts)] = each
    return Parts(parts)


def free_name(name: str, taken: Container[Any]) -> str:
    return next(
        each for n in itertools.count() if (each := f"{name}_{n}" if n else name) not in taken
    )
