"""Hooks on the modules of a torch model: their outputs, and the gradients of the outputs.

In a model that torch.compile compiles, hooks insert operators into the graph; see `graph_outputs`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from tensortap.core.record import Kind
from tensortap.core.rooms import offers
from tensortap.rooms.track.batches import ObservedBatch
from tensortap.rooms.track.observing import Explain, HookObserver, inputs_of, tensors_in
from tensortap.rooms.track.torch import internals
from tensortap.rooms.track.torch.descriptions import Descriptions
from tensortap.rooms.track.torch.gradients import Collectives, OutputGradients, OutputPlace
from tensortap.rooms.track.torch.graph_outputs import GraphProbe, insert
from tensortap.rooms.track.torch.hooks import ModuleHook, hook_module
from tensortap.rooms.track.torch.layouts import Layouts
from tensortap.rooms.track.torch.names import Names, type_name, unwrapped
from tensortap.stats import summarize as stats
from tensortap.values.torch import private
from tensortap.values.torch.summarize import EXCHANGES

GENERATED = 1_000_000  # the first call of a pass within `generate`
_SCRIPTED = "a ScriptModule takes no hooks, so its output and its modules' are not seen"
OBSERVED = "a model is observed"
_TRAINED_IN_EVAL = "it is trained in eval() mode: call model.train(), or pass only_training=False"
_NOT_CALLED = "its weights are used, but the module itself is not called, so it has no output"


class ModuleCall(NamedTuple):
    """One call of a module: where it is counted, and what to capture of it."""

    step: int
    call: int
    activation: bool
    gradient: bool


class _Hooked(NamedTuple):
    """The hooks on one module, and what they were made for."""

    wanted: tuple[ModuleCall, bool]
    probe: GraphProbe
    undo: list[Callable[[], object]]


class OutputHooks:
    """Hooks on every module of a model; `title` is a prefix of their names."""

    def __init__(self, root: torch.nn.Module, observer: HookObserver, title: str = "") -> None:
        self.root = root
        self.observer = observer
        self.title = title
        self._undo: list[Callable[[], None]] = []
        self._modules: dict[str, torch.nn.Module] = {}
        self._hooked: dict[str, _Hooked] = {}
        self._calls: dict[tuple[str, int], int] = {}  # by name and first call
        self._recomputable: dict[str, list[int]] = {}  # calls that a checkpoint may repeat
        # finds where a NaN was made, if a room does
        self.origins: Any = None
        for origins_of in offers("track.origins") if observer.explains else ():
            self.origins = origins_of(root)
        self._layouts = Layouts(root)
        batch = None if self._layouts.mesh else observer.batch
        self.descriptions = Descriptions(detaching=batch is None)
        self._collectives = Collectives(observer)
        # modules with weights of their own that have not been called yet
        self._uncalled: dict[str, torch.nn.Module] = {}
        self._context = None if batch is None or not EXCHANGES else self._shared(batch)
        self._gradients = OutputGradients(
            observer, self.origins, self.descriptions, self._collectives, self._context
        )
        self.calls_in_graphs = 0  # of operators in compiled graphs, wanted or not
        self._skipped_eval = False  # whether a pass of this step was skipped, with gradients
        self._root_name = title
        root = unwrapped(root)
        self._stage_root = root if next(root.children(), None) is not None else None

    def _shared(self, batch: ObservedBatch) -> Any:
        """Return what the hooks in C share."""
        return stats.kernel.HookContext(
            batch.summaries, batch.hand_over, self.observer, self.root, self._collectives.waiting,
            self._uncalled, self._next_call, torch.is_grad_enabled, private.backward_pass,
            private.version_of,
        )  # fmt: skip

    def attach(self) -> None:
        if not {Kind.ACTIVATION, Kind.GRADIENT} & set(self.observer.kinds):
            return
        forget = functools.partial(internals.forget_graphs, OBSERVED, self.root)
        forget(begins=True)
        self._undo.append(functools.partial(forget, begins=False))
        self._modules = self.modules()
        self._root_name = next(iter(self._modules), self.title)
        # a graph gets every hook that may be wanted later: one more would compile it anew
        self._select(self.observer.could_want if self.is_compiled else self.observer.wants)

    @property
    def is_compiled(self) -> bool:
        """Return whether graphs of the model exist, or will."""
        if internals.compiled_modules(self.root):
            return True
        return internals.compiler_is_loaded() and internals.may_have_graphs(self.root)

    def modules(self) -> dict[str, torch.nn.Module]:
        """Return the modules by name; the model itself comes first."""
        found = list(Names(self.root).modules())
        if not self.title:
            return dict(found)
        names = [self.title, *(f"{self.title}.{name}" for name, _ in found[1:])]
        return dict(zip(names, [module for _, module in found], strict=True))

    def select(
        self, whole: Callable[[Kind, str], bool], chosen: Iterable[str] | None = None
    ) -> None:
        """Hook the modules that this step wants, and no others; `whole` are to be kept whole.

        `chosen` are those that it may want, if that is known.
        Compiled graphs keep their hooks, and ask when they run: without one they would be compiled
        anew.
        """
        names = None if chosen is None else {*self._hooked, *chosen}
        self._select(self.observer.wants, whole, names)

    def _select(
        self,
        wants: Callable[[Kind, str], bool],
        whole: Callable[[Kind, str], bool] = lambda kind, name: False,
        names: Iterable[str] | None = None,
    ) -> None:
        for name in list(self._modules) if names is None else names:
            module, known = self._modules[name], self._hooked.get(name)
            if known is not None and known.probe.runs:
                continue
            activation, gradient = wants(Kind.ACTIVATION, name), wants(Kind.GRADIENT, name)
            wanted = ModuleCall(0, 0, activation, gradient)
            slowly = whole(Kind.ACTIVATION, name) or whole(Kind.GRADIENT, name)
            if known is None or known.wanted != (wanted, slowly):
                self._unhook(name)
                if activation or gradient:
                    self._hook_module(name, module, wanted, slowly)

    def _hook_module(
        self, name: str, module: torch.nn.Module, wanted: ModuleCall, slowly: bool
    ) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            self.observer.unseen[name] = _SCRIPTED
            return
        cls = type_name(unwrapped(module))
        hook = self._hook(module, name, cls, wanted, slowly)
        probe = GraphProbe(self, name, cls, wanted)
        hooked = self._hooked[name] = _Hooked((wanted, slowly), probe, [])
        own = module.parameters(recurse=False) if self._layouts.mesh else ()
        if any(hasattr(parameter, "device_mesh") for parameter in own):
            note = functools.partial(self._on_computed, name)
            hooked.undo.append(hook_module(module, ModuleHook(note), prepend=True))
        if self.observer.inputs and wanted.activation:
            note = functools.partial(self._on_inputs, name, cls)
            undo = hook_module(module, ModuleHook(note), before=True, with_kwargs=True)
            hooked.undo.append(undo)
        both = ModuleHook(hook, insert, probe.tensors)
        hooked.undo.append(hook_module(module, both, with_kwargs=True))
        if _needs_call(module):
            self._uncalled[name] = module

    def _unhook(self, name: str) -> None:
        hooked = self._hooked.pop(name, None)
        if hooked is not None:
            for undo in reversed(hooked.undo):
                undo()
            hooked.probe.close()
            self._uncalled.pop(name, None)

    @property
    def in_graphs(self) -> bool:
        """Return whether hooks were compiled into graphs, which have run."""
        return any(hooked.probe.runs for hooked in self._hooked.values())

    def _hook(
        self, module: torch.nn.Module, name: str, cls: str, wanted: ModuleCall, slowly: bool
    ) -> Callable[..., Any]:
        """Return a hook on the output of a module: one in C, if most outputs may be plain."""
        general = functools.partial(self._on_output, name, cls, wanted, module)
        if self._context is None or module is self._stage_root or slowly:
            return general
        output, gradient = (
            stats.kernel.TensorDescription(self.descriptions.of, name, kind, cls)
            for kind in (Kind.ACTIVATION, Kind.GRADIENT)
        )
        hook_gradient = functools.partial(self._hook_gradient, name, cls, gradient)
        hook: Callable[..., Any] = stats.kernel.OutputHook(
            self._context, general, module, name,
            output if wanted.activation else None, hook_gradient if wanted.gradient else None,
        )  # fmt: skip
        return hook

    def _hook_gradient(
        self, name: str, cls: str, description: Any, tensor: torch.Tensor, step: int, call: int
    ) -> None:
        self._gradients.hook(tensor, OutputPlace(name, cls, step, call), description)

    def _on_computed(self, name: str, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self.observer.capturing:
            self._layouts.computed(name, output)

    def detach(self) -> None:
        for name in list(self._hooked):
            self._unhook(name)
        while self._undo:
            self._undo.pop()()
        self._gradients.end_step()
        self._uncalled.clear()

    @property
    def is_hooked(self) -> bool:
        """Return whether any hook may have seen something."""
        return bool(self._hooked or self._collectives.waiting)

    def uncalled_names(self) -> set[str]:
        """Return the names of modules with weights that have not been called yet."""
        return set(self._uncalled)

    def end_step(self, is_trained: Callable[[torch.nn.Parameter], bool]) -> None:
        """Report modules that are trained but not called, and begin to count calls from zero."""
        self._collectives.poll(most=0)
        if self.observer.capturing:
            unseen = self.observer.unseen
            if self._calls:
                unseen.update(dict.fromkeys(self._trained_uncalled(is_trained), _NOT_CALLED))
            elif self._skipped_eval:
                unseen[self._root_name] = _TRAINED_IN_EVAL
        self._skipped_eval = False
        self._calls.clear()
        self._layouts.end_step()
        self._recomputable.clear()
        self._gradients.end_step()
        for hooked in self._hooked.values():
            hooked.probe.end_step()
        if self.origins is not None:
            self.origins.end_step()

    def _trained_uncalled(self, is_trained: Callable[[torch.nn.Parameter], bool]) -> Iterator[str]:
        """Yield the modules that are trained without being called, each once."""
        found = [
            (name, weights)
            for name, module in self._uncalled.items()
            if (weights := [p for p in module.parameters(recurse=False) if is_trained(p)])
        ]
        if not found:
            return
        called = {  # a tied weight may belong to a module that is called
            id(parameter)
            for name, module in Names(self.root).modules()
            if name not in self._uncalled
            for parameter in module.parameters(recurse=False)
        }
        for name, weights in found:
            del self._uncalled[name]
            if not any(id(parameter) in called for parameter in weights):
                yield name

    def _on_inputs(
        self, name: str, cls: str, module: torch.nn.Module, args: Any, kwargs: Any
    ) -> None:
        """Observe what a module is called with, before it changes that in place."""
        observer, training = self.observer, self.root.training
        if not observer.capturing or (observer.only_training and not training):
            return
        if private.backward_pass() != -1:  # a checkpoint recomputes what was observed before
            return
        mode = mode_tags(training)
        first = GENERATED if mode is _GENERATING else 0
        call = self._calls.get((name, first), first)
        tags = {**mode, "module": name, "input": "1"}
        try:
            for path, tensor in inputs_of(args, kwargs, torch.Tensor):
                shard, placed = self._layouts.of_input(tensor)
                own_tags = {**tags, **placed}
                seen = name + path, Kind.ACTIVATION, tensor, call, cls, own_tags, shard
                look = functools.partial(self._observe_later, seen, observer.step_number, None)
                self._collectives.observe(tensor, name, look)
        except Exception as error:
            observer.fault(name, error)

    def _on_output(self, name: str, *call: Any) -> None:
        if self.observer.capturing:
            try:
                self._collectives.poll()
                self._observe(name, *call)
            except Exception as error:
                self.observer.fault(name, error)

    def _observe(
        self,
        name: str,
        cls: str,
        wanted: ModuleCall,
        original: torch.nn.Module,
        module: torch.nn.Module,
        args: Any,
        kwargs: Any,
        output: Any,
    ) -> None:
        observer, training, inputs = self.observer, self.root.training, (args, kwargs)
        if observer.only_training and not training:
            self._skipped_eval |= torch.is_grad_enabled()
            return
        if original is self._stage_root and internals.is_inner_stage():
            return  # the model has no such output
        self._uncalled.pop(name, None)
        again = private.backward_pass() != -1  # a checkpoint recomputes in the backward pass
        tags = mode_tags(training)
        wanted = _counted_as(wanted, tags)
        replica, grad = module is not original, torch.is_grad_enabled()
        counted = self._count(wanted, name, again, grad, replica, output)
        if counted is None:
            return
        step, call, activation, gradient = counted
        activation = activation and observer.wants(Kind.ACTIVATION, name)
        gradient = gradient and observer.wants(Kind.GRADIENT, name)
        origins, explain = None if again else self.origins, None
        if origins is not None:
            origins.called(name, inputs)
        for path, tensor in tensors_in(output, torch.Tensor):
            own_tags = {**tags, "module": name} if path else tags
            shard, placed = self._layouts.of(name, original, tensor, inputs)
            if placed:
                own_tags = {**own_tags, **placed}
            if activation:
                if origins is not None:
                    explain = origins.of_output(name, cls, step, inputs, output, tensor)
                all_tags = {**own_tags, "recompute": "1"} if again else own_tags
                seen = name + path, Kind.ACTIVATION, tensor, call, cls, all_tags, shard
                if type(tensor) is torch.Tensor:
                    found = self.descriptions.observed(*seen)
                    observer.observe(*found, step, None, explain)
                else:
                    look = functools.partial(self._observe_later, seen, step, explain)
                    self._collectives.observe(tensor, name, look)
            if gradient and tensor.requires_grad and tensor.is_floating_point():
                place = OutputPlace(name + path, cls, step, call, own_tags, shard)
                self._gradients.hook(tensor, place)
        if origins is not None:
            origins.passed(name, output, activation)

    def _observe_later(self, seen: tuple[Any, ...], step: int, explain: Explain | None) -> None:
        self.observer.observe(*self.descriptions.observed(*seen), step, None, explain)

    def count_in_graph(
        self, wanted: ModuleCall, name: str, again: bool, grad: bool
    ) -> tuple[ModuleCall, dict[str, str]] | None:
        """Return where a call in a compiled graph is counted, and its tags; None to ignore it."""
        training = self.root.training
        if self.observer.only_training and not training:
            self._skipped_eval |= grad
            return None
        self._uncalled.pop(name, None)
        tags = mode_tags(training, grad)
        counted = self._count(_counted_as(wanted, tags), name, again, grad)
        return None if counted is None else (counted, tags)

    def _count(
        self,
        wanted: ModuleCall,
        name: str,
        again: bool,
        grad: bool,
        replica: bool = False,
        output: Any = None,
    ) -> ModuleCall | None:
        """Return where this call is counted and what to capture of it; None to ignore it.

        Calls are counted from that of `wanted` on. `grad` says whether gradients are on. A
        `replica` is a copy of the module that DataParallel made for one call.
        """
        if again:  # a backward pass goes from the last call to the first
            calls = self._recomputable.get(name)
            call = calls.pop() if calls else 0
        else:
            call = self._next_call(name, wanted.call)
        return ModuleCall(self.observer.step_number, call, wanted.activation, wanted.gradient)

    def _next_call(self, name: str, first: int = 0) -> int:
        """Return the number of a call of this step that is not repeated."""
        key = name, first
        call = self._calls.get(key, first)
        self._calls[key] = call + 1
        self._recomputable.setdefault(name, []).append(call)
        return call


def _needs_call(module: torch.nn.Module) -> bool:
    """Return whether a module has weights and, unlike a list of parameters, can be called."""
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return False  # out_proj of nn.MultiheadAttention, whose output is that of the attention
    can_be_called = getattr(type(module), "forward", None) is not torch.nn.Module.forward
    return can_be_called and next(module.parameters(recurse=False), None) is not None


_TRAINED: dict[str, str] = {}  # never changed
_GENERATING = {"mode": "generate"}


def _counted_as(wanted: ModuleCall, tags: dict[str, str]) -> ModuleCall:
    """Return a call to count; generation does not change the calls of passes that are trained."""
    return wanted._replace(call=GENERATED) if tags is _GENERATING else wanted


def mode_tags(training: bool, grad: bool | None = None) -> dict[str, str]:
    """Return the tag that tells a forward pass from one that is trained on.

    `grad` says whether gradients are on, where torch does not know.
    """
    if not training:
        return {"mode": "eval"}
    if torch.is_grad_enabled() if grad is None else grad:
        return _TRAINED
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_qualname == "CheckpointFunction.forward":
            return _TRAINED  # a backward pass recomputes it with gradients
        if "generate" in frame.f_code.co_name:  # `_generate_and_score_completions` of trl as well
            return _GENERATING
    return {"mode": "no_grad"}
