"""Outputs of modules inside compiled graphs, and their gradients.

`insert` is what a hook does while torch.compile traces it; a `GraphProbe` gets the tensors when the
graph runs. Which call a gradient belongs to is not part of a graph: as backward passes go from the
last call to the first, it is the last call that has got none yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tensortap.frameworks.observing import tensors_in
from tensortap.frameworks.torch import graphs, private
from tensortap.frameworks.torch.shards import observed
from tensortap.record import Kind

if TYPE_CHECKING:
    from tensortap.frameworks.torch.hooks import ModuleHook
    from tensortap.frameworks.torch.outputs import ModuleCall, OutputHooks


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
        note = "\n".join(["1" if torch.is_grad_enabled() else "", *paths])
        graphs.look(values, hook.probe, "", note)


class ForwardCall(NamedTuple):
    """A call of a module whose gradient is expected."""

    step: int
    call: int
    tags: dict[str, str]


class GraphProbe:
    """Takes the outputs of one module, and their gradients, from compiled graphs."""

    def __init__(self, hooks: OutputHooks, name: str, cls: str, wanted: ModuleCall) -> None:
        self._hooks = hooks
        self._name = name
        self._cls = cls
        self._wanted = wanted
        self._calls: dict[str, list[ForwardCall]] = {}  # by path, those without a gradient
        self._last: dict[str, tuple[ForwardCall, int]] = {}  # and how many gradients it has got
        gradient = graphs.probe(self._on_gradient) if wanted.gradient else None
        self.tensors = graphs.probe(self._on_output), gradient

    def close(self) -> None:
        for probe in self.tensors:
            if probe is not None:
                graphs.drop(probe)

    def end_step(self) -> None:
        """Forget calls without a gradient."""
        self._calls.clear()
        self._last.clear()

    def _on_output(self, values: list[torch.Tensor], note: str) -> None:
        if self._hooks.observer.capturing:
            try:
                grad, *paths = note.split("\n")
                # graphs run without it, whatever the program said
                with torch.set_grad_enabled(bool(grad)):
                    self._observe(dict(zip(paths, values, strict=True)))
            except Exception as error:
                self._hooks.observer.fault(self._name, error)

    def _observe(self, output: dict[str, torch.Tensor]) -> None:
        again = private.backward_pass() != -1  # a checkpoint recomputes in the backward pass
        counted = self._hooks.count_in_graph(self._wanted, self._name, again, output)
        if counted is None:
            return
        (step, call, activation, gradient), tags = counted
        name, observer = self._name, self._hooks.observer
        for path, tensor in output.items():
            own_tags = {**tags, "module": name} if path else tags
            if activation:
                all_tags = {**own_tags, "recompute": "1"} if again else own_tags
                seen = observed(name + path, Kind.ACTIVATION, tensor, call, self._cls, all_tags)
                observer.observe(*seen, step)
            if gradient and not again:
                self._calls.setdefault(path, []).append(ForwardCall(step, call, own_tags))

    def _on_gradient(self, values: list[torch.Tensor], path: str) -> None:
        hooks = self._hooks
        if not hooks.observer.active:
            return
        try:
            calls = self._calls.get(path)
            if calls:
                found, passes = calls.pop(), 1
            elif path in self._last:  # a second backward pass over the same graph
                found, passes = self._last[path]
                passes += 1
            else:
                hooks.note_backward()
                return
            self._last[path] = found, passes
            step, call, tags = found
            if passes > 1:
                tags = {**tags, "backward": str(passes)}
            seen = observed(self._name + path, Kind.GRADIENT, values[0], call, self._cls, tags)
            hooks.observer.observe(*seen, step)
        except Exception as error:
            hooks.observer.fault(self._name, error)
