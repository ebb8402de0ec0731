"""What of a model can be watched, found out by one forward and one backward pass."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from tensortap.frameworks.torch.names import Names
from tensortap.frameworks.torch.outputs import Outputs
from tensortap.frameworks.torch.tensors import why_not
from tensortap.pipeline.pipeline import pipeline
from tensortap.record import Kind, Summary
from tensortap.sources.observer import Seen, TrackOptions
from tensortap.sources.outputs import leaves
from tensortap.sources.patterns import Patterns


class Probe(NamedTuple):
    """One name that can be watched, or the reason why not.

    `output` and `gradient` say whether hooks saw them. `in_place` says that what follows
    overwrites the output: a hook sees it as it was put out, whoever looks later does not.
    """

    name: str
    type: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    output: bool = False
    gradient: bool = False
    in_place: bool = False
    note: str = ""


class Probes(tuple[Probe, ...]):
    """What `list_probes` has found; printed, it is a table."""

    __slots__ = ()

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("name", "type", "shape", "dtype", "output", "gradient", "in place", "")
        ]
        for p in self:
            shape = "×".join(map(str, p.shape)) or "scalar"
            marks = ("yes" if mark else "no" for mark in (p.output, p.gradient, p.in_place))
            rows.append((p.name, p.type, shape if p.dtype else "", p.dtype, *marks, p.note))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


def list_probes(model: torch.nn.Module, *inputs: Any, **named: Any) -> Probes:
    """What of a model can be watched: ``print(tap.list_probes(model, batch))``.

    Runs the model forward and backward once, on copies of the inputs. Gradients, buffers, random
    numbers and the mode of the model are afterwards as they were.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(inplace=True))
    >>> [(p.name, p.shape, p.gradient, p.in_place) for p in list_probes(model, torch.ones(1, 2))][1]
    ('0', (1, 3), True, True)
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"list_probes looks at a torch.nn.Module, not at {model!r:.100}")
    seen = _Look()
    hooks = _Hooks(model, seen)
    with _untouched(model), torch.enable_grad():
        hooks.attach()
        try:
            output = model(*_copied(inputs), **_copied(named))
            hooks.look_again()
            ends = [t for _, t in leaves(output, torch.Tensor)
                    if t.requires_grad and (t.is_floating_point() or t.is_complex())]  # fmt: skip
            if ends:
                torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
            with_gradient = {name for name, p in Names(model).parameters() if p.grad is not None}
        finally:
            hooks.detach()
    return Probes((*_modules(model, seen, bool(ends)), *_parameters(model, with_gradient)))


class _Look:
    """Notes what hooks observe, by name."""

    def __init__(self) -> None:
        self.settings = TrackOptions(only_training=False)
        self.patterns = Patterns()
        self.active = self.on = True
        self.unseen: dict[str, str] = {}
        self.step_number = 0
        self.outputs: dict[str, tuple[Seen, str]] = {}
        self.gradients: set[str] = set()
        self.overwritten: set[str] = set()

    def observe(
        self, seen: Seen, value: Any, step: int | None = None, stats: Summary | None = None
    ) -> Summary | None:
        if seen.kind is Kind.ACTIVATION:
            self.outputs[seen.name] = seen, why_not(value)
        else:
            self.gradients.add(seen.name)
        return None


class _Hooks(Outputs):
    """The hooks of `track` and `watch`, which remember which outputs are overwritten later."""

    def __init__(self, root: torch.nn.Module, look: _Look) -> None:
        super().__init__(root, look)
        self._look = look
        self._put_out: list[tuple[str, torch.Tensor, int]] = []

    def _turn(self, wanted: Any, name: str, again: bool, module: Any, output: Any) -> Any:
        if not again:
            for path, tensor in leaves(output, torch.Tensor):
                if not tensor.is_inference():
                    self._put_out.append((name + path, tensor, tensor._version))
        return super()._turn(wanted, name, again, module, output)

    @property
    def _on(self) -> bool:
        return self.observer.on  # all others are off meanwhile

    def look_again(self) -> None:
        """The forward pass is over."""
        self._look.overwritten = {
            name for name, tensor, version in self._put_out if tensor._version != version
        }
        self._put_out.clear()


def _modules(model: torch.nn.Module, look: _Look, backward: bool) -> Iterator[Probe]:
    for name, module in Names(model).modules():
        kind = type(module).__name__
        found = [key for key, (seen, _) in look.outputs.items()
                 if key == name or seen.tags.get("module") == name]  # fmt: skip
        if not found:
            note = look.unseen.get(name, "it was not called, or put out no tensor")
            yield Probe(name, kind, note=note)
        for key in found:
            seen, problem = look.outputs[key]
            gradient = key in look.gradients
            note = problem
            if not problem and not gradient:
                note = "no gradient came" if backward else "the model's output needs no gradient"
            yield Probe(
                key, kind, seen.shape, seen.dtype, not problem, gradient, key in look.overwritten,
                note,
            )  # fmt: skip


def _parameters(model: torch.nn.Module, with_gradient: set[str]) -> Iterator[Probe]:
    for name, parameter in Names(model).parameters():
        gradient = name in with_gradient
        note = "" if gradient else "no gradient came" if parameter.requires_grad else "frozen"
        dtype = str(parameter.dtype).removeprefix("torch.")
        kind = "Parameter"
        yield Probe(name, kind, tuple(parameter.shape), dtype, True, gradient, False, note)


def _copied(value: Any) -> Any:
    """Inputs that the model may overwrite."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value


@contextlib.contextmanager
def _untouched(model: torch.nn.Module) -> Iterator[None]:
    """Put everything back as it was: what a pass changes in a model is not the user's training."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    attributes = [
        (vars(module), {key: dict(value) if key in _TABLES else value
                        for key, value in vars(module).items()})
        for module in model.modules()
    ]  # fmt: skip
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    enabled = pipeline.enabled
    pipeline.switch(False)  # a pass of ours is nothing that anybody tracks or watches
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        with torch.random.fork_rng(devices=_devices(model)):
            yield
    finally:
        pipeline.switch(enabled)
        for held, saved in attributes:
            _restore(held, saved)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


_TABLES = ("_parameters", "_buffers", "_modules")


def _restore(held: dict[str, Any], saved: dict[str, Any]) -> None:
    for key in list(held):
        if key not in saved:
            del held[key]
    for key, value in saved.items():
        if key in _TABLES:
            table = held[key]
            table.clear()
            table.update(value)
        elif held.get(key) is not value:
            held[key] = value


def _devices(model: torch.nn.Module) -> list[int]:
    """The CUDA devices whose random numbers a pass may use."""
    return sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
