"""Outputs of modules inside compiled graphs, and their gradients.

`insert` is what a hook does while torch.compile traces it; a `GraphProbe` gets the tensors when the
graph runs. Which call a gradient belongs to is not part of a graph: as backward passes go from the
last call to the first, it is the last call that has got none yet.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tensortap.core.record import Kind
from tensortap.rooms.track.observing import tensors_in
from tensortap.rooms.track.torch.hooks import GraphTensors
from tensortap.values.torch import graphs, private

if TYPE_CHECKING:
    from tensortap.rooms.track.torch.hooks import ModuleHook
    from tensortap.rooms.track.torch.outputs import ModuleCall, OutputHooks


def insert(hook: ModuleHook, module: Any, args: Any, kwargs: Any, output: Any) -> None:
    """Insert operators for the tensors in an output into the graph that is being traced."""
    values, paths = [], []
    for path, tensor in tensors_in(output, torch.Tensor):
        values.append(tensor.detach())
        paths.append(path)
        gradient = hook.gradient_probe
        if gradient is not None and tensor.requires_grad and tensor.is_floating_point():
            graphs.look_at_gradient(tensor, gradient, "", path)
    if values:
        grad = "1" if torch.is_grad_enabled() else ""
        graphs.look(values, hook.probe, "", "\n".join([grad, *paths]))


@functools.lru_cache(4096)
def _parts(note: str) -> tuple[bool, list[str]]:
    """Return whether gradients were on in the program (in graphs they are off), and the paths."""
    grad, *paths = note.split("\n")
    return bool(grad), paths


class ForwardCall(NamedTuple):
    """A call of a module whose gradient is expected."""

    step: int
    call: int
    tags: dict[str, str]


class ExpectedGradients:
    """The calls of a module, in one step, whose gradients are expected."""

    def __init__(self) -> None:
        self._calls: list[ForwardCall] = []  # those without a gradient
        self._last: ForwardCall | None = None
        self._passes = 0  # how many gradients the last one has got

    def expect(self, call: ForwardCall) -> None:
        self._calls.append(call)

    def next(self) -> ForwardCall | None:
        """Return the call that a gradient belongs to; None if there was none."""
        if self._calls:
            self._last, self._passes = self._calls.pop(), 1
        elif self._last is not None:  # a second backward pass over the same graph
            self._passes += 1
            tags = {**self._last.tags, "backward": str(self._passes)}
            return self._last._replace(tags=tags)
        return self._last


class GraphProbe:
    """Takes the outputs of one module, and their gradients, from compiled graphs."""

    def __init__(self, hooks: OutputHooks, name: str, cls: str, wanted: ModuleCall) -> None:
        self._hooks = hooks
        self.name = name
        self._cls = cls
        self._wanted = wanted
        self._expected: dict[str, ExpectedGradients] = {}  # by path
        self.runs = False  # whether a graph with it has run
        gradient = graphs.probe(self._on_gradient) if wanted.gradient else None
        self.tensors = GraphTensors(graphs.probe(self._on_output), gradient)

    def close(self) -> None:
        for probe in (self.tensors.output, self.tensors.gradient):
            if probe is not None:
                graphs.drop(probe)

    def end_step(self) -> None:
        """Forget calls without a gradient."""
        self._expected.clear()

    def _on_output(self, values: list[torch.Tensor], note: str) -> None:
        self.runs = True
        self._hooks.calls_in_graphs += 1
        if self._hooks.observer.capturing:
            try:
                self._observe(values, *_parts(note))
            except Exception as error:
                self._hooks.observer.fault(self.name, error)

    def _observe(self, values: list[torch.Tensor], grad: bool, paths: list[str]) -> None:
        again = private.backward_pass() != -1  # a checkpoint recomputes in the backward pass
        counted = self._hooks.count_in_graph(self._wanted, self.name, again, grad)
        if counted is None:
            return
        (step, call, activation, gradient), tags = counted
        name, cls, hooks = self.name, self._cls, self._hooks
        wants = hooks.observer.wants  # a session may have switched it off in this step
        activation = activation and wants(Kind.ACTIVATION, name)
        gradient = gradient and wants(Kind.GRADIENT, name)
        for path, tensor in zip(paths, values, strict=True):
            own_tags = {**tags, "module": name} if path else tags
            if activation:
                all_tags = {**own_tags, "recompute": "1"} if again else own_tags
                described = name + path, Kind.ACTIVATION, tensor, call, cls, all_tags
                hooks.observer.observe(*hooks.descriptions.observed(*described), step)
            if gradient and not again:
                expected = self._expected.setdefault(path, ExpectedGradients())
                expected.expect(ForwardCall(step, call, own_tags))

    def _on_gradient(self, values: list[torch.Tensor], path: str) -> None:
        hooks = self._hooks
        hooks.calls_in_graphs += 1
        if not hooks.observer.active:
            return
        try:
            expected = self._expected.get(path)
            found = None if expected is None else expected.next()
            if found is None:
                return
            step, call, tags = found
            described = self.name + path, Kind.GRADIENT, values[0], call, self._cls, tags
            hooks.observer.observe(*hooks.descriptions.observed(*described), step)
        except Exception as error:
            hooks.observer.fault(self.name, error)
