"""Torch in `watch`: hooks on modules, parameters and tensors, and the probes of a model."""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from tensortap.capture.pipeline import pipeline
from tensortap.core.record import Kind, Summary
from tensortap.rooms.track.observing import Explain, Hooks, Observed, tensors_in
from tensortap.rooms.track.torch.descriptions import observed
from tensortap.rooms.track.torch.names import Names
from tensortap.rooms.track.torch.outputs import ModuleCall, OutputHooks
from tensortap.rooms.watch.watch_observer import TargetObserver
from tensortap.values.torch import private
from tensortap.values.torch.tensors import dtype_name, why_not


def without_graph() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which operations are not recorded for gradients."""
    context: contextlib.AbstractContextManager[Any] = torch.no_grad()
    return context


def version_of(value: Any) -> int:
    """Return a number that grows when a tensor is changed in place; 0 for other values."""
    return private.version_of(value) if isinstance(value, torch.Tensor) else 0


def survives_fork() -> bool:
    """Return whether a fork of this process can use torch: the state of CUDA does not survive."""
    return not torch.cuda.is_initialized()


def after_fork() -> None:
    """Make torch usable in a fork, which does not have the threads of the parent's pool."""
    torch.set_num_threads(1)


def hooks_on(target: Any, observer: TargetObserver, title: str) -> Hooks | None:
    """Return hooks for a module, parameter or tensor; None for anything else."""
    if isinstance(target, torch.nn.Module):
        return WatchedModule(target, observer, title)
    if isinstance(target, torch.Tensor):
        is_parameter = isinstance(target, torch.nn.Parameter)
        return WatchedTensor(target, observer, title or ("parameter" if is_parameter else "tensor"))
    return None


class WatchedModule(OutputHooks):
    """Hooks on a module and all modules in it, captured as often as the rate allows."""

    def __init__(self, root: torch.nn.Module, observer: TargetObserver, title: str) -> None:
        super().__init__(root, observer, title)
        self._watch = observer
        self._devices: dict[str, torch.device] = {}

    def _count(
        self, wanted: ModuleCall, name: str, again: bool, replica: bool, output: Any
    ) -> ModuleCall | None:
        watch = self._watch
        step, call = watch.place(name, again)
        if replica and not self._is_watched_replica(name, output):
            return None
        # outputs that a checkpoint recomputes were captured before, but gradients come from here
        activation = wanted.activation and not again and watch.due(name, Kind.ACTIVATION)
        gradient = wanted.gradient and torch.is_grad_enabled() and watch.due(name, Kind.GRADIENT)
        return ModuleCall(step, call, activation, gradient) if activation or gradient else None

    def _is_watched_replica(self, name: str, output: Any) -> bool:
        """Return whether a replica of DataParallel is on the device whose outputs are watched."""
        for _, tensor in tensors_in(output, torch.Tensor):
            return bool(self._devices.setdefault(name, tensor.device) == tensor.device)
        return False


class WatchedTensor:
    """A hook on a tensor: its gradient whenever one is computed, and its value with it."""

    def __init__(self, tensor: torch.Tensor, observer: TargetObserver, title: str) -> None:
        if not tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter):
            raise TypeError(
                f"{title!r} requires no gradient, so no hook would ever run: capture its value "
                "with watcher.catch(tensor, name)"
            )
        self._tensor = weakref.ref(tensor)
        self._observer = observer
        self._title = title
        self._handle: Any = None

    def attach(self) -> None:
        """Install the hook; capture a frozen parameter once."""
        tensor = self._tensor()
        if tensor is None:
            return
        if not isinstance(tensor, torch.nn.Parameter):
            self._handle = tensor.register_hook(self._on_gradient)
        elif tensor.requires_grad:
            self._handle = tensor.register_post_accumulate_grad_hook(self._on_parameter)
        else:
            self._on_parameter(tensor)

    def detach(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _on_parameter(self, parameter: torch.nn.Parameter) -> None:
        kinds = self._observer.kinds
        values = {Kind.WEIGHT: parameter, Kind.WEIGHT_GRADIENT: parameter.grad}
        self._observe({kind: tensor for kind, tensor in values.items() if kind in kinds})

    def _on_gradient(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        kinds = self._observer.kinds
        value = self._tensor() if {Kind.ACTIVATION, Kind.GRADIENT} <= set(kinds) else None
        self._observe({Kind.VALUE: value, Kind.GRADIENT: gradient})

    def _observe(self, tensors: dict[Kind, torch.Tensor | None]) -> None:
        observer, name = self._observer, self._title
        if not observer.capturing:
            return
        try:
            step, call = observer.place(name)
            for kind, tensor in tensors.items():
                if tensor is not None and observer.due(name, kind):
                    observer.observe(*observed(name, kind, tensor, call), step)
        except Exception as error:
            observer.fault(name, error)


# -- probes ---------------------------------------------------------------------------


class Probe(NamedTuple):
    """A name that can be watched, or the reason why it cannot.

    `output` and `gradient` say whether hooks saw them.
    """

    name: str
    type: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    output: bool = False
    gradient: bool = False
    note: str = ""


def list_probes(model: Any, *inputs: Any, **named: Any) -> list[Probe]:
    """Return what of a model can be watched: ``tap.rooms.watch.list_probes(model, batch)``.

    Runs the model forward and backward once, on copies of the inputs. Gradients, buffers, random
    numbers and the mode of the model are afterwards as they were.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(inplace=True))
    >>> [(p.name, p.shape, p.gradient) for p in list_probes(model, torch.ones(1, 2))][1]
    ('0', (1, 3), True)
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"list_probes needs a torch.nn.Module, got {model!r:.100}")
    notes = _Notes()
    hooks = OutputHooks(model, notes)
    enabled = pipeline.enabled
    pipeline.switch(False)  # nobody tracks or watches this pass
    try:
        with _restored(model), torch.enable_grad():
            hooks.attach()
            try:
                output = model(*_copied(inputs), **_copied(named))
                ends = [t for _, t in tensors_in(output, torch.Tensor) if t.requires_grad]
                if ends:
                    torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
                parameters = Names(model).parameters()
                with_gradient = {name for name, p in parameters if p.grad is not None}
            finally:
                hooks.detach()
    finally:
        pipeline.switch(enabled)
    return [*_modules(model, notes, bool(ends)), *_parameters(model, with_gradient)]


class _Notes:
    """An observer that notes what hooks see, by name."""

    only_training = explains = inputs = False
    batch = None
    kinds = (Kind.ACTIVATION, Kind.GRADIENT)
    active = capturing = True
    step_number = 0

    def __init__(self) -> None:
        self.unseen: dict[str, str] = {}
        self.outputs: dict[str, tuple[Observed, str]] = {}
        self.gradients: set[str] = set()

    def wants(self, kind: Kind, name: str) -> bool:
        return True

    def observe(
        self,
        observed: Observed,
        value: Any,
        step: int | None = None,
        stats: Summary | None = None,
        explain: Explain | None = None,
    ) -> Summary | None:
        if observed.kind is Kind.ACTIVATION:
            self.outputs[observed.name] = observed, why_not(value)
        else:
            self.gradients.add(observed.name)
        return None

    def fault(self, name: str, error: Exception) -> None:
        self.unseen[name] = str(error)


def _modules(model: torch.nn.Module, notes: _Notes, backward: bool) -> Iterator[Probe]:
    for name, module in Names(model).modules():
        cls = type(module).__name__
        keys = [key for key, (seen, _) in notes.outputs.items()
                if key == name or seen.tags.get("module") == name]  # fmt: skip
        if not keys:
            yield Probe(name, cls, note=notes.unseen.get(name, "not called, or returned no tensor"))
        for key in keys:
            seen, problem = notes.outputs[key]
            gradient = key in notes.gradients
            note = problem
            if not problem and not gradient:
                note = "got no gradient" if backward else "the model's output requires no gradient"
            yield Probe(key, cls, seen.shape, seen.dtype, not problem, gradient, note)


def _parameters(model: torch.nn.Module, with_gradient: set[str]) -> Iterator[Probe]:
    for name, parameter in Names(model).parameters():
        gradient = name in with_gradient
        note = "" if gradient else "got no gradient" if parameter.requires_grad else "frozen"
        dtype, shape = dtype_name(parameter.dtype), tuple(parameter.shape)
        yield Probe(name, "Parameter", shape, dtype, True, gradient, note)


def _copied(value: Any) -> Any:
    """Return inputs that the model may overwrite."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value


@contextlib.contextmanager
def _restored(model: torch.nn.Module) -> Iterator[None]:
    """Restore everything that a pass changes: attributes, gradients, buffers, random numbers."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    # of dicts also the contents: a pass may register parameters, buffers, modules
    contents = [(value, dict(value)) for _, saved in attributes for value in saved.values()
                if isinstance(value, dict)]  # fmt: skip
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        devices = {p.device.index or 0 for p in model.parameters() if p.is_cuda}
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        for namespace, saved in (*attributes, *contents):
            namespace.clear()
            namespace.update(saved)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
