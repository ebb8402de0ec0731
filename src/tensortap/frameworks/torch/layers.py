"""Hooks that show analyses what the modules of a torch model compute."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tensortap.frameworks.analyzing import ModuleOutput, OutputArray, StepListener
from tensortap.frameworks.observing import TrackObserver, tensors_in
from tensortap.frameworks.torch import graphs, private
from tensortap.frameworks.torch.attention import (
    AttentionCalls,
    UnreadableLogits,
    begin_module,
    end_module,
)
from tensortap.frameworks.torch.graph_outputs import insert
from tensortap.frameworks.torch.hooks import GraphTensors, ModuleHook, hook_module
from tensortap.frameworks.torch.host import host_view
from tensortap.frameworks.torch.outputs import OBSERVED, mode_tags
from tensortap.record import Kind

_UNREADABLE = "outputs that the host cannot read, as in a captured CUDA graph, are not analyzed"
_ATTENTION = "attention"
_CHANNELS_FIRST = ("Conv1d", "ConvTranspose1d", "BatchNorm1d", "InstanceNorm1d", "SyncBatchNorm")


class LayerHooks:
    """Hooks on the outputs of modules, and on the attention that they compute."""

    def __init__(
        self, root: torch.nn.Module, observer: TrackObserver, listener: StepListener
    ) -> None:
        self._root = root
        self._observer = observer
        self._listener = listener
        self._undo: list[Callable[[], object]] = []
        self._calls: dict[str, int] = {}
        # the last output, its version and its name: a container returns that of its last module
        self._last: tuple[Any, int, str] | None = None
        self._running: dict[int, list[tuple[str, Any]]] = {}  # by thread; the innermost is the last
        # by number in a graph: names or logits that wait for the other
        self._waiting: dict[str, list[dict[str, Any]]] = {}

    def attach(self, modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
        """Hook into the modules that are selected."""
        wanted = [pair for pair in modules if self._observer.wants(Kind.HEALTH, pair[0])]
        attention = self._listener.wants("attention")
        if not attention and not self._listener.wants("output"):
            return
        graphs.forget_graphs(OBSERVED, begins=True)
        self._undo.append(functools.partial(graphs.forget_graphs, OBSERVED, begins=False))
        for name, module in wanted:
            probe = graphs.probe(functools.partial(self._on_graph, name, module))
            self._undo.append(functools.partial(graphs.drop, probe))
            end = ModuleHook(
                functools.partial(self._on_output, name), _insert_end, GraphTensors(probe)
            )
            self._undo.append(hook_module(module, end, with_kwargs=True))
            if attention:
                begin = ModuleHook(functools.partial(self._on_begin, name), _insert_begin)
                self._undo.append(hook_module(module, begin, before=True))
        if attention:
            calls = AttentionCalls(self._on_attention)
            calls.attach()
            self._undo.append(calls.detach)

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()

    def end_step(self) -> None:
        self._calls.clear()
        self._running.clear()
        self._waiting.clear()
        self._last = None

    def _is_observed(self) -> bool:
        """Return whether a forward pass that is running now is one to look at."""
        observer = self._observer
        if not observer.capturing or private.backward_pass() != -1:  # a checkpoint recomputes it
            return False
        return not (observer.only_training and mode_tags(self._root.training))

    def _on_begin(self, name: str, module: torch.nn.Module, *_: Any) -> None:
        """Note that a module is called, unless it is in a graph."""
        if self._observer.capturing and private.backward_pass() == -1:
            self._running.setdefault(threading.get_ident(), []).append((name, module))

    def _on_end(self, name: str) -> None:
        """Forget a call, and those in it that have raised an error."""
        running = self._running.get(threading.get_ident(), [])
        if any(name == each for each, _ in running):
            while running.pop()[0] != name:
                pass

    def _on_attention(self, logits: Callable[[Any], Any], number: str) -> None:
        running = self._running.get(threading.get_ident())
        if not (number or running) or not self._is_observed():
            return
        try:
            if number:
                self._match(number, logits=logits(None))
            elif running:
                name, module = running[-1]
                if (found := logits(module)) is not None:
                    self._listener.attention(name, found)
        except UnreadableLogits as error:
            self._observer.unseen.setdefault("attention", str(error))
        except Exception as error:
            self._observer.fault("attention", error)

    def _match(self, number: str, **found: Any) -> None:
        """Take logits from a graph with the name of their module, whichever of them comes first."""
        waiting = self._waiting.setdefault(number, [])
        if waiting and waiting[0].keys() != found.keys():
            self._listener.attention(**waiting.pop(0), **found)
        else:
            waiting.append(found)

    def _on_output(
        self, name: str, module: torch.nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        self._on_end(name)
        if self._is_observed():
            self._take(name, module, tensors_in(output, torch.Tensor))

    def _on_graph(
        self, name: str, module: torch.nn.Module, values: list[torch.Tensor], note: str
    ) -> None:
        """Take outputs from a compiled graph; see `graph_outputs`."""
        grad, *paths = note.split("\n")
        with torch.set_grad_enabled(bool(grad)):
            if not self._is_observed():
                return
            if values:
                self._take(name, module, zip(paths, values, strict=True))
                return
            for number in paths[0].split()[1:]:
                self._match(number, name=name)

    def _take(
        self, name: str, module: torch.nn.Module, found: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        try:
            call = self._calls[name] = self._calls.get(name, -1) + 1
            with torch.no_grad():
                arrays = tuple(self._arrays(name, module, found))
                self._listener.output(ModuleOutput(name, module, call, arrays))
        except Exception as error:
            self._observer.fault(name, error)

    def _arrays(
        self, name: str, module: torch.nn.Module, found: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[OutputArray]:
        for path, tensor in found:
            if hasattr(tensor, "wait"):  # a collective that the program overlaps with work
                continue
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            array = None if hasattr(local, "wait") else host_view(local.detach())
            if array is None:
                self._observer.unseen.setdefault(name, _UNREADABLE)
                continue
            version, same_as, last = private.version_of(tensor), "", self._last
            if last is not None and last[0]() is tensor and last[1] == version:
                same_as = last[2]
            self._last = weakref.ref(tensor), version, name + path
            yield OutputArray(name + path, array, _channel_axis(module, array.ndim), same_as)


def _insert_begin(hook: ModuleHook, module: Any, args: Any) -> None:
    """Note that the graph that is being traced begins with a module."""
    begin_module()


def _insert_end(hook: ModuleHook, module: Any, args: Any, kwargs: Any, output: Any) -> None:
    """Insert operators for the output of a module, and for the attention that it has computed."""
    insert(hook, module, args, kwargs, output)
    if numbers := end_module():
        grad = "1" if torch.is_grad_enabled() else ""
        graphs.look([], hook.probe, "", f"{grad}\n{_ATTENTION} {numbers}")


def _channel_axis(module: torch.nn.Module, dimensions: int) -> int:
    """Return which dimension of an output has the channels.

    >>> _channel_axis(torch.nn.Linear(2, 2), 3), _channel_axis(torch.nn.Conv2d(2, 2, 1), 4)
    (-1, 1)
    """
    first = dimensions == 3 and type(module).__name__ in _CHANNELS_FIRST
    return 1 if first or dimensions >= 4 else -1
