"""The calls of modules inside compiled graphs, for the origin of values that are not finite.

A graph has no frames of Python to look into. Two operators per module tell instead when its call
begins, with its inputs and the line that made the call, and when it ends. In the backward pass,
a third one looks at the gradient of each input that is no module's output.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tensortap.frameworks.observing import HookObserver, tensors_in
from tensortap.frameworks.origin import caller_name
from tensortap.frameworks.torch import graphs, private, private_compiler
from tensortap.frameworks.torch.hidden import constant_when_compiled
from tensortap.frameworks.torch.hooks import GraphTensors, ModuleHook, hook_module

if TYPE_CHECKING:
    from tensortap.frameworks.torch.origins import Origins


class RunningGraphCall(NamedTuple):
    """A call of a module that is under way in a graph, and the function and line that made it."""

    name: str
    caller: str
    evidence: Any  # what its inputs contain; see `origins`


def _caller() -> str:
    """Return the function and the line that call a module, while that is compiled."""
    frame = private_compiler.traced_caller("torch.nn.modules.module")
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
    values, numbers = [], []
    for _, tensor in tensors_in((args, kwargs), torch.Tensor):
        if tensor.is_floating_point() or tensor.is_complex():
            number = graphs.number_of(hook, tensor)
            if number[0] == "+":
                graphs.look_at_gradient(tensor, hook.probe, "", f"gradient\n\n{number}")
            numbers.append(number)
            values.append(tensor.detach())
    graphs.look(values, hook.probe, "", f"enter\n{_caller()}\n{' '.join(numbers)}")


def _leave(hook: ModuleHook, module: Any, args: Any, kwargs: Any, output: Any) -> None:
    graphs.look([], hook.probe, "", "leave\n\n")


class GraphCalls:
    """The calls that are under way in graphs, and the modules that are called with a tensor.

    `look` returns what tensors contain.
    """

    def __init__(
        self, observer: HookObserver, origins: Origins, look: Callable[[Any], Any]
    ) -> None:
        self._observer = observer
        self._origins = origins
        self._look = look
        self._running: list[RunningGraphCall] = []
        self._uses: dict[str, list[str]] = {}  # by the number of the tensor
        self._inputs: dict[tuple[str, str], list[str]] = {}  # by the first module as well

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
        tensors = GraphTensors(probe)
        begin, end = (ModuleHook(in_eager_code, each, tensors, self) for each in (_enter, _leave))
        enter = hook_module(module, begin, before=True, with_kwargs=True)
        leave = hook_module(module, end, with_kwargs=True)

        def detach() -> None:
            enter()
            leave()
            graphs.drop(probe)

        return detach

    def _receive(self, name: str, values: list[torch.Tensor], note: str) -> None:
        event, caller, numbers = note.split("\n")
        if event == "gradient":
            names = self._inputs.get((name, numbers))
            if names is not None and self._observer.active:
                self._origins.note_gradient(values[0], names)
            return
        if not self._observer.capturing or private.backward_pass() != -1:
            return
        if event == "enter":
            self._running.append(RunningGraphCall(name, caller, self._look(values)))
            for tensor, number in zip(values, numbers.split(), strict=True):
                self._call_with(name, tensor, number)
            return
        while self._running and self._running.pop().name != name:
            pass  # a call that raised has not ended

    def _call_with(self, name: str, tensor: torch.Tensor, number: str) -> None:
        uses = self.uses(number)
        if uses is not None and number[0] == "+":
            outer = self._origins.uses_of_memory(tensor)
            if outer is not None:  # an output of a module outside of the graph
                self._uses[number[1:]] = uses = outer
            self._inputs[name, number] = uses
        if uses is not None:
            uses.append(name)

    def uses(self, number: str) -> list[str] | None:
        """Return the modules that are called with a tensor; the list grows as they are."""
        if number[0] == "+":
            self._uses[number[1:]] = []
        return self._uses.get(number.removeprefix("+"))

    def running(self, name: str) -> list[RunningGraphCall]:
        """Return the calls that are under way, the innermost first, which must be of this name."""
        found = self._running[::-1]
        return found if found and found[0].name == name else []

    def clear(self) -> None:
        self._running.clear()
        self._uses.clear()
        self._inputs.clear()
