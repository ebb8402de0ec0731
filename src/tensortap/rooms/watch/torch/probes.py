"""The probes of a torch model, found by one forward and one backward pass."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tensortap.core.record import Kind, Summary
from tensortap.rooms.track.observing import Explain, Observed, tensors_in
from tensortap.rooms.track.torch.names import Names
from tensortap.rooms.track.torch.outputs import ModuleCall, OutputHooks
from tensortap.rooms.watch.watch_observer import Probe
from tensortap.values.torch.private import version_of
from tensortap.values.torch.tensors import dtype_name, why_not


def find_probes(
    model: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]
) -> list[Probe] | None:
    """Run a model once on copies of the inputs; return its modules and parameters as probes.

    Gradients, buffers, random numbers and the mode of the model are restored afterwards. None if
    it is not a torch model.
    """
    if not isinstance(model, torch.nn.Module):
        return None
    notes = _Notes()
    hooks = _ProbeHooks(model, notes)
    with _restored(model), torch.enable_grad():
        hooks.attach()
        try:
            output = model(*_copied(inputs), **_copied(named))
            hooks.end_forward()
            ends = [t for _, t in tensors_in(output, torch.Tensor)
                    if t.requires_grad and (t.is_floating_point() or t.is_complex())]  # fmt: skip
            if ends:
                torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
            with_gradient = {name for name, p in Names(model).parameters() if p.grad is not None}
        finally:
            hooks.detach()
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
        self.overwritten: set[str] = set()

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


class _ProbeHooks(OutputHooks):
    """The hooks of `track` and `watch`, which also note outputs that are overwritten later."""

    def __init__(self, root: torch.nn.Module, notes: _Notes) -> None:
        super().__init__(root, notes)
        self._notes = notes
        self._outputs: list[tuple[str, torch.Tensor, int]] = []

    def _count(
        self, wanted: ModuleCall, name: str, again: bool, replica: bool, output: Any
    ) -> ModuleCall | None:
        if not again:
            for path, tensor in tensors_in(output, torch.Tensor):
                self._outputs.append((name + path, tensor, version_of(tensor)))
        return super()._count(wanted, name, again, replica, output)

    def end_forward(self) -> None:
        """Note which outputs have been overwritten since their hook ran."""
        self._notes.overwritten = {
            name for name, tensor, version in self._outputs if version_of(tensor) != version
        }
        self._outputs.clear()


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
            yield Probe(
                key, cls, seen.shape, seen.dtype, not problem, gradient, key in notes.overwritten,
                note,
            )  # fmt: skip


def _parameters(model: torch.nn.Module, with_gradient: set[str]) -> Iterator[Probe]:
    for name, parameter in Names(model).parameters():
        gradient = name in with_gradient
        note = "" if gradient else "got no gradient" if parameter.requires_grad else "frozen"
        dtype, shape = dtype_name(parameter.dtype), tuple(parameter.shape)
        yield Probe(name, "Parameter", shape, dtype, True, gradient, False, note)


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
