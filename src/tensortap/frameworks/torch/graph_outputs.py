"""Outputs of modules inside compiled graphs, and their gradients.

`insert` is what a hook does while torch.compile traces it; a `GraphProbe` gets the tensors when the
graph runs, or their statistics after a CUDA graph was replayed. Which call a gradient belongs to is
not part of a graph: as backward passes go from the last call to the first, it is the last call that
has got none yet.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tensortap.frameworks.observing import Observed, tensors_in
from tensortap.frameworks.torch import graphs, private, replayed
from tensortap.frameworks.torch.hooks import GraphTensors
from tensortap.frameworks.torch.shards import observed
from tensortap.record import Kind

if TYPE_CHECKING:
    from tensortap.frameworks.torch.hooks import ModuleHook
    from tensortap.frameworks.torch.outputs import ModuleCall, OutputHooks


def insert(hook: ModuleHook, module: Any, args: Any, kwargs: Any, output: Any) -> None:
    """Insert operators for the tensors in an output into the graph that is being traced."""
    if hook.rows is not None and isinstance(output, torch.Tensor) and torch.is_grad_enabled():
        if output.device == hook.rows.device and replayed.is_captured(output):
            replayed.reduce(output.detach(), hook.rows, hook.clock)
            if hook.gradient_rows is not None and output.requires_grad:
                replayed.reduce_gradient(output, hook.gradient_rows, hook.clock)
            return
    values, paths, numbers = [], [], []
    for path, tensor in tensors_in(output, torch.Tensor):
        values.append(tensor.detach())
        paths.append(path)
        gradient = hook.gradient_probe
        number = "0"
        if gradient is not None and tensor.requires_grad and tensor.is_floating_point():
            number = graphs.number_of(hook, tensor)
            graphs.look_at_gradient(tensor, gradient, "", path)
        numbers.append(number)
    if values:
        grad = "1" if torch.is_grad_enabled() else ""
        note = "\n".join([grad, " ".join(numbers), *paths])
        graphs.look(values, hook.probe, "", note)


class ForwardCall(NamedTuple):
    """A call of a module whose gradient is expected."""

    step: int
    call: int
    tags: dict[str, str]
    uses: list[str] | None = None  # the modules that took the output; None if that is not known


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
    """Takes the outputs of one module, and their gradients, from compiled graphs.

    In CUDA graphs, `rows` are the buffers for both, and the clock of all buffers.
    """

    def __init__(
        self,
        hooks: OutputHooks,
        name: str,
        cls: str,
        wanted: ModuleCall,
        rows: Sequence[torch.Tensor | None],
    ) -> None:
        self._hooks = hooks
        self.name = name
        self._cls = cls
        self._wanted = wanted
        self._expected: dict[str, ExpectedGradients] = {}  # by path
        gradient = graphs.probe(self._on_gradient) if wanted.gradient else None
        self.tensors = GraphTensors(graphs.probe(self._on_output), gradient, *rows)

    def close(self) -> None:
        for probe in (self.tensors.output, self.tensors.gradient):
            if probe is not None:
                graphs.drop(probe)

    def end_step(self) -> None:
        """Forget calls without a gradient."""
        self._expected.clear()

    def _on_output(self, values: list[torch.Tensor], note: str) -> None:
        if self._hooks.observer.capturing:
            try:
                grad, numbers, *paths = note.split("\n")
                # graphs run without it, whatever the program said
                with torch.set_grad_enabled(bool(grad)):
                    self._observe(dict(zip(paths, values, strict=True)), numbers.split())
            except Exception as error:
                self._hooks.observer.fault(self.name, error)

    def _observe(self, output: dict[str, torch.Tensor], numbers: list[str]) -> None:
        again = private.backward_pass() != -1  # a checkpoint recomputes in the backward pass
        counted = self._hooks.count_in_graph(self._wanted, self.name, again, output)
        if counted is None:
            return
        (step, call, activation, gradient), tags = counted
        name, observer = self.name, self._hooks.observer
        origins, explain = None if again else self._hooks.origins, None
        if origins is not None:
            explain = origins.of_graph_output(name, self._cls, step)
        for (path, tensor), number in zip(output.items(), numbers, strict=True):
            own_tags = {**tags, "module": name} if path else tags
            if activation:
                all_tags = {**own_tags, "recompute": "1"} if again else own_tags
                seen = observed(name + path, Kind.ACTIVATION, tensor, call, self._cls, all_tags)
                observer.observe(*seen, step, None, explain)
            if gradient and not again:
                expected = self._expected.setdefault(path, ExpectedGradients())
                uses = None if origins is None else origins.graph_calls.uses(number)
                expected.expect(ForwardCall(step, call, own_tags, uses))
        if origins is not None:
            origins.passed_in_graph(name)

    def _on_gradient(self, values: list[torch.Tensor], path: str) -> None:
        hooks = self._hooks
        if not hooks.observer.active:
            return
        try:
            expected = self._expected.get(path)
            found = None if expected is None else expected.next()
            if found is None:
                hooks.note_backward()
                return
            step, call, tags, uses = found
            seen = observed(self.name + path, Kind.GRADIENT, values[0], call, self._cls, tags)
            explain = None
            if hooks.origins is not None and uses is not None:
                explain = hooks.origins.of_gradient(uses, values[0])
            hooks.observer.observe(*seen, step, None, explain)
        except Exception as error:
            hooks.observer.fault(self.name, error)

    def add(self, kind: Kind, call: ForwardCall, row: replayed.Row) -> None:
        """Record statistics that were read after a CUDA graph was replayed."""
        if kind is Kind.GRADIENT or self._wanted.activation:
            dtype, shape, _ = row.kind
            seen = Observed(self.name, kind, call.call, self._cls, dtype, shape, None, call.tags)
            self._hooks.observer.observe(seen, None, call.step, row.stats)


_TOO_MANY = (
    f"it was called more than {replayed.ROWS} times in a step: inside CUDA graphs, the statistics "
    "of further calls, and of all gradients in that step, are dropped"
)


def record_replayed(
    probes: Sequence[GraphProbe], step: int, rows: list[replayed.Row], full: list[int]
) -> dict[str, str]:
    """Record the rows of a step; return the names of modules with too many calls, and why."""
    calls: collections.Counter[int] = collections.Counter()
    recomputable: dict[int, list[int]] = collections.defaultdict(list)
    expected: dict[int, ExpectedGradients] = collections.defaultdict(ExpectedGradients)
    too_many = {index // 2 for index in full}
    for row in rows:
        number, is_gradient = divmod(row.buffer, 2)
        if is_gradient:
            found = None if number in too_many else expected[number].next()
            if found is not None:
                probes[number].add(Kind.GRADIENT, found, row)
        elif row.kind.again:  # a backward pass goes from the last call to the first
            known = recomputable[number]
            tags = {"recompute": "1"}
            call = ForwardCall(step, known.pop() if known else 0, tags)
            probes[number].add(Kind.ACTIVATION, call, row)
        else:
            call = ForwardCall(step, calls[number], {})
            calls[number] += 1
            recomputable[number].append(call.call)
            expected[number].expect(call)
            probes[number].add(Kind.ACTIVATION, call, row)
    return {probes[number].name: _TOO_MANY for number in too_many}
