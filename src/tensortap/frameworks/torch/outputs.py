"""What the modules of a torch model put out, and the gradients of that, observed by hooks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tensortap.frameworks.torch.compiled import WHOLE, forget_graphs, is_whole, outside
from tensortap.frameworks.torch.names import Names, type_name, unwrapped
from tensortap.frameworks.torch.seen import seen_of
from tensortap.pipeline.pipeline import pipeline
from tensortap.record import Kind, Summary
from tensortap.sources.observer import Observing
from tensortap.sources.outputs import leaves

_current_graph_task: Callable[[], int] = torch._C._current_graph_task_id


def _nothing() -> None:
    return None


class Turn(NamedTuple):
    """Which call of a module this is, and what of it is wanted."""

    step: int
    call: int
    activation: bool
    gradient: bool


class Outputs:
    """Hooks on every module of a model; `title` goes before their names."""

    def __init__(self, root: torch.nn.Module, observer: Observing, title: str = "") -> None:
        self.root = root
        self.observer = observer
        self.title = title
        self._handles: list[Any] = []
        self._leaves: list[Any] = []  # hooks on tensors that outlive their step
        self._calls: dict[str, int] = {}
        self._open: dict[str, list[int]] = {}  # calls that a checkpoint may make again
        self._last: tuple[Callable[[], Any], int, Summary | None] = (_nothing, 0, None)

    def attach(self) -> None:
        """Put the hooks in place."""
        settings = self.observer.settings
        if not (settings.activations or settings.gradients):
            return
        forget_graphs()
        for i, (name, module) in enumerate(Names(self.root).modules(whole=is_whole)):
            if self.title:  # the model itself comes first
                name = f"{self.title}.{name}" if i else self.title
            self._attach_module(module, name)

    def _attach_module(self, module: torch.nn.Module, name: str) -> None:
        settings, patterns = self.observer.settings, self.observer.patterns
        activation = settings.activations and patterns.wants(Kind.ACTIVATION, name)
        gradient = settings.gradients and patterns.wants(Kind.GRADIENT, name)
        if not (activation or gradient):
            return
        kind = type_name(unwrapped(module))
        hook = functools.partial(self._on_output, name, kind, activation, gradient)
        handle = module.register_forward_hook(outside(hook, name, self._not_seen))
        self._handles.append(handle)

    def _not_seen(self, name: str) -> None:
        self.observer.unseen[name] = WHOLE

    def detach(self) -> None:
        """Remove every hook."""
        for handles in (self._handles, self._leaves):
            while handles:
                handles.pop().remove()
        forget_graphs()

    def end_step(self) -> None:
        """The calls of the next step are counted from zero."""
        self._calls.clear()
        self._open.clear()
        while self._leaves:
            self._leaves.pop().remove()

    def _on_output(
        self,
        name: str,
        kind: str,
        activation: bool,
        gradient: bool,
        module: torch.nn.Module,
        args: Any,
        output: Any,
    ) -> None:
        if not self._on:
            return
        observer = self.observer
        try:
            training = self.root.training
            if observer.settings.only_training and not training:
                return
            again = _current_graph_task() != -1  # a checkpoint, in the backward pass
            turn = self._turn(Turn(0, 0, activation, gradient), name, again, module, output)
            if turn is None:
                return
            step, call, activation, gradient = turn
            tags = {} if training else {"mode": "eval"}
            for path, tensor in leaves(output, torch.Tensor):
                told = {**tags, "module": name} if path else tags
                if activation:
                    marked = {**told, "recompute": "1"} if again else told
                    observer.observe(
                        *seen_of(name + path, Kind.ACTIVATION, tensor, call, kind, marked), step
                    )
                if gradient and tensor.requires_grad and tensor.is_floating_point():
                    self._watch_gradient(name + path, tensor, step, call, kind, told)
        except Exception as error:
            pipeline.fault(name, error)

    def _turn(
        self, wanted: Turn, name: str, again: bool, module: torch.nn.Module, output: Any
    ) -> Turn | None:
        """Which call this is, and what of it is wanted; None of those that are passed over."""
        call = self._call_again(name) if again else self._next_call(name)
        return wanted._replace(step=self.observer.step_number, call=call)

    @property
    def _on(self) -> bool:
        return self.observer.on and pipeline.enabled

    def _hold(self, name: str, handle: Any) -> None:
        self._leaves.append(handle)

    def _next_call(self, name: str) -> int:
        """Which call of the module within the step this is."""
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        self._open.setdefault(name, []).append(call)
        return call

    def _call_again(self, name: str) -> int:
        """Which call a checkpoint makes again: backward goes from the last to the first."""
        calls = self._open.get(name)
        return calls.pop() if calls else 0

    def _known(self, gradient: torch.Tensor) -> Summary | None:
        """The statistics of a gradient that was just looked at: of a module and of its last part.

        Nothing comes between two hooks on one tensor.
        """
        last, version, stats = self._last
        return stats if last() is gradient and version == gradient._version else None

    def _watch_gradient(
        self, name: str, tensor: torch.Tensor, step: int, call: int, kind: str, tags: dict[str, str]
    ) -> None:
        tasks: list[int] = []
        shape = tensor.shape

        def on_gradient(gradient: torch.Tensor | None) -> None:
            observer = self.observer
            task = _current_graph_task()
            if gradient is None or not observer.active or task in tasks:
                return
            tasks.append(task)
            try:
                looked_at = gradient if gradient.shape == shape else gradient.reshape(shape)
                said = tags if len(tasks) == 1 else {**tags, "backward": str(len(tasks))}
                seen, local = seen_of(name, Kind.GRADIENT, looked_at, call, kind, said)
                stats = observer.observe(seen, local, step, self._known(gradient))
                self._last = weakref.ref(gradient), gradient._version, stats
            except Exception as error:
                pipeline.fault(name, error)

        on_gradient._torchdynamo_disable = True  # type: ignore[attr-defined]
        handle = tensor.register_hook(on_gradient)
        if tensor.is_leaf:
            self._hold(name, handle)  # a parameter that is put out as it is: it stays
        base = tensor._base if tensor._is_view() else None
        if base is not None and base.grad_fn is not None and base.numel() == tensor.numel():
            # an in-place operation that follows takes the view's own node out of the graph
            number = base.output_nr
            base.grad_fn.register_prehook(lambda grads: on_gradient(grads[number]))
