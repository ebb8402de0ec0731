"""Find the module, the phase and the line of an operation of torch.

A backward operation gets the line of the forward that created it: torch numbers the nodes of its
graph in the order in which forward operations make them, so the numbers that are new since the last
operation belong to the one that runs now.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tensortap.rooms.ops.operations import (
    BACKWARD,
    FORWARD,
    NOWHERE,
    OPTIMIZER,
    OWN,
    RECOMPUTE,
    USER,
    SourceLine,
    SourceLines,
    folder_of,
)
from tensortap.rooms.track.torch.hooks import ModuleHook, hook_module
from tensortap.rooms.track.torch.names import Names

# Private: which node of the graph a backward pass runs, its number, and the number of the next one.
# Without them, backward operations count as forward ones at the line that called ``backward()``.
_running_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
_next_node: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)
_NODES = 1 << 18  # of the graph whose places are remembered
_TORCH = folder_of("torch")


class OperationPlace(NamedTuple):
    """Phase, module, number of its call within the step, line, and the node that ran it."""

    phase: str
    module: str
    call: int
    line: SourceLine
    node: str = ""


class OperationPlaces:
    """Follows the modules, nodes and optimizers that run, between `attach` and `detach`."""

    def __init__(self, root: torch.nn.Module | None) -> None:
        self._lines = SourceLines((_TORCH,), (os.path.join(_TORCH, "autograd", "graph.py"),))
        self._names = None if root is None else Names(root)
        self._parameters: dict[int, str] = {}
        for name, parameter in () if self._names is None else self._names.parameters():
            self._parameters.setdefault(id(parameter), name)
        self._thread = threading.get_ident()
        self._running: list[tuple[str, int]] = []  # calls of modules: name and number
        self._calls: dict[str, int] = {}
        self._made: dict[int, OperationPlace] = {}  # nodes of the graph, by number
        self._next_node = _next_node()
        self._last: tuple[OperationPlace, bool] | None = None
        self._optimizers = 0
        self._updated: dict[int, str] = {}  # tensors of the running optimizer, by id
        self._group: list[str] = []  # parameters of the last operation on lists
        self._parameter = ""
        self._undo: list[Callable[[], object]] = []

    def attach(self) -> None:
        self._thread = threading.get_ident()
        for name, module in () if self._names is None else self._names.modules():
            enter, leave = (functools.partial(f, name) for f in (self._enter, self._leave))
            self._undo += [
                hook_module(module, ModuleHook(enter), before=True, prepend=True),
                hook_module(module, ModuleHook(leave), always_call=True),
            ]
        self._undo += [
            register_optimizer_step_pre_hook(self._begin_update).remove,
            register_optimizer_step_post_hook(self._end_update).remove,
        ]

    def detach(self) -> None:
        """Stop, and forget everything about the program."""
        while self._undo:
            self._undo.pop()()
        self._running.clear()
        self._made.clear()
        self._updated.clear()

    def end_step(self) -> None:
        """Count the calls of modules from 0 again."""
        self._calls.clear()

    # -- hooks: they must not raise -----------------------------------------------------------

    def _enter(self, name: str, module: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            call = self._calls.get(name, 0)
            self._calls[name] = call + 1
            self._running.append((name, call))

    def _leave(self, name: str, module: torch.nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:
            names = [each[0] for each in self._running]
            if name in names:  # those above it were left by an exception
                del self._running[len(names) - 1 - names[::-1].index(name) :]

    def _begin_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._optimizers += 1
        self._updated.clear()
        self._group, self._parameter = [], ""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._parameters.get(id(parameter), "")
                for tensor in (parameter, parameter.grad):
                    if tensor is not None:
                        self._updated[id(tensor)] = name

    def _end_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._optimizers = max(0, self._optimizers - 1)

    # -- places -------------------------------------------------------------------------------

    def find(self, frame: FrameType | None, in_place: bool) -> OperationPlace | None:
        """Return the place of the operation that runs now; None for one of tensortap's own."""
        kind, line = self._lines.find(frame)
        if kind == OWN:
            return None
        node = _running_node()
        if node is None:
            return self._forward(line, in_place)
        made = self._made.get(_number_of(node), _UNKNOWN)
        if self._running:  # the forward pass that a checkpoint runs again
            module, call = self._running[-1]
            return OperationPlace(RECOMPUTE, module, call, line if kind == USER else made.line)
        name = str(node.name()).rpartition("::")[2]
        module = made.module
        if made is _UNKNOWN:  # an accumulated gradient
            parameter = self._parameters.get(id(getattr(node, "variable", None)), "")
            module = parameter.rpartition(".")[0]
        if kind != USER:  # otherwise a backward function that the user wrote
            line = made.line
        return OperationPlace(BACKWARD, module, made.call, line, name)

    def _forward(self, line: SourceLine, in_place: bool) -> OperationPlace:
        if self._optimizers:
            return OperationPlace(OPTIMIZER, "", 0, line)
        module, call = "", 0
        if self._running:
            module, call = self._running[-1]
        place = OperationPlace(FORWARD, module, call, line)
        upcoming = _next_node()
        if upcoming != self._next_node:
            self._remember(upcoming, place)
        self._last = place, in_place
        return place

    def _remember(self, upcoming: int, place: OperationPlace) -> None:
        """Note that this operation has made the newest node of the graph."""
        if upcoming - self._next_node > _NODES or len(self._made) > _NODES:
            self._made.clear()
            self._next_node = upcoming - 1
        for number in range(self._next_node, upcoming - 1):
            # an operation in place makes a node of its own after it has run
            self._made[number] = self._last[0] if self._last and self._last[1] else place
        self._made[upcoming - 1] = place
        self._next_node = upcoming

    # -- parameters of optimizers -----------------------------------------------------------------

    def updated(self, args: tuple[Any, ...]) -> list[str]:
        """Return the parameters that an operation of an optimizer updates, one per list item."""
        lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg]
        if not lists:
            known = (self._updated.get(id(arg)) for arg in args)
            self._parameter = next((name for name in known if name), self._parameter)
            return [self._parameter]
        for found in lists:
            names = [self._updated.get(id(each), "") for each in found]
            if all(names):
                self._group = names
                return names
        return self._group if len(self._group) == len(lists[0]) else []


_UNKNOWN = OperationPlace(BACKWARD, "", 0, NOWHERE)


def _number_of(node: Any) -> int:
    """Return the number of a node of the graph; nodes are numbered in the order of the forward."""
    number: int = getattr(node, "_sequence_nr", lambda: -1)()
    return number
