"""The calls of modules inside compiled graphs, for the origin of values that are not finite.

A graph has no frames of Python to look into. Two operators per module tell instead when its call
begins, with its inputs and the line that made the call, and when it ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch

from tensortap.frameworks.observing import HookObserver, tensors_in
from tensortap.frameworks.origin import caller_name
from tensortap.frameworks.torch import graphs, private
from tensortap.frameworks.torch.hidden import constant_when_compiled
from tensortap.frameworks.torch.hooks import GraphTensors, ModuleHook, hook_module


class RunningGraphCall(NamedTuple):
    """A call of a module that is under way in a graph, and the function and line that made it."""

    name: str
    caller: str
    evidence: Any  # what its inputs contain; see `origins`


def _caller() -> str:
    """Return the function and the line that call a module, while that is compiled."""
    frame = private.traced_caller("torch.nn.modules.module")
    return "" if frame is None else caller_name(frame)


constant_when_compiled(_caller)


def eager_caller() -> str:
    """Return the function and the line of the user's program that run a graph."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(("torch.", "tensortap.")):
            return caller_name(frame)
        frame = frame.f_back
    return ""


def _enter(hook: ModuleHook, module: Any, args: Any, kwargs: Any) -> None:
    found = [tensor for _, tensor in tensors_in((args, kwargs), torch.Tensor)]
    values = [x.detach() for x in found if x.is_floating_point() or x.is_complex()]
    graphs.look(values, hook.probe, "", "enter\n" + _caller())


def _leave(hook: ModuleHook, module: Any, args: Any, kwargs: Any, output: Any) -> None:
    graphs.look([], hook.probe, "", "leave\n")


class GraphCalls:
    """The calls that are under way in graphs; `look` returns what tensors contain."""

    def __init__(self, observer: HookObserver, look: Callable[[Any], Any]) -> None:
        self._observer = observer
        self._look = look
        self._running: list[RunningGraphCall] = []

    def attach(self, module: torch.nn.Module, name: str) -> Callable[[], None]:
        """Follow the calls of a module; return a function that ends this."""

        def receive(values: list[torch.Tensor], note: str) -> None:
            try:
                self._receive(name, values, note)
            except Exception as error:
                self._observer.fault(name, error)

        def in_eager_code(*args: Any) -> None:
            """Do nothing: there, frames tell which calls are under way."""

        probe = graphs.probe(receive)
        hooks = [ModuleHook(in_eager_code, each, GraphTensors(probe)) for each in (_enter, _leave)]
        enter = hook_module(module, hooks[0], before=True, with_kwargs=True)
        leave = hook_module(module, hooks[1], with_kwargs=True)

        def detach() -> None:
            enter()
            leave()
            graphs.drop(probe)

        return detach

    def _receive(self, name: str, values: list[torch.Tensor], note: str) -> None:
        if not self._observer.capturing or private.backward_pass() != -1:
            return
        event, caller = note.split("\n")
        if event == "enter":
            self._running.append(RunningGraphCall(name, caller, self._look(values)))
            return
        while self._running and self._running.pop().name != name:
            pass  # a call that raised has not ended

    def running(self, name: str) -> list[RunningGraphCall]:
        """Return the calls that are under way, the innermost first, which must be of this name."""
        found = self._running[::-1]
        return found if found and found[0].name == name else []

    def clear(self) -> None:
        self._running.clear()
