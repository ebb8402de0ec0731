"""The probes of traced functions inside compiled graphs.

torch.compile traces these instead of the probes themselves. Of a call that is under way, a graph
knows a key; its receiver keeps the call when the graph runs. Tensors, and lists and dicts of them,
are handed over by the graph. For any other value the graph breaks, if it may.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from tensortap.frameworks.torch import graphs, private_compiler
from tensortap.frameworks.torch.hidden import (
    constant_when_compiled,
    hide_from_compiler,
    replace_when_compiled,
)

log = logging.getLogger("tensortap")

_CONSTANTS = (bool, int, float, str)
_TENSOR = "\0tensor"  # stands for the next tensor in what `_without_tensors` returns
_probes: Any = None  # the module of the probes, given to `compile_probes`
_calls: dict[tuple[Any, ...], GraphCall] = {}
_containers: list[Any] = []  # values that contain tensors, without them
_reported: set[tuple[str, str]] = set()


def compile_probes(probes: Any) -> None:
    """Make torch.compile trace the functions below instead of these probes."""
    global _probes
    if _probes is None:
        _probes = probes
        for name, function in _IN_GRAPH.items():
            replace_when_compiled(getattr(probes, name), function)


class GraphCall:
    """A function, or one nested in another, whose calls compiled graphs report."""

    def __init__(self, number: int, this: int, outer: str, name: str) -> None:
        self._function = number, this
        self._outer = outer
        self._name = name
        self.calls: Any = None  # those under way, one per listener
        self.key = graphs.register(f"tensortap.trace:{number}.{name}", self)
        _probes.in_graphs[self.key] = self

    def __call__(self, values: list[torch.Tensor], note: str) -> None:
        event, name, part, container = note.split("\n")
        if event == "enter":
            if self._outer:
                self.calls = _probes.nested(self._outer, self._name)
            else:
                self.calls = _probes.enter_on(*self._function)
        elif event == "exit":
            _probes.exit_(self.calls)
        else:
            value = _with_tensors(_containers[int(container)], iter(values))
            if event == "bind":
                _probes.bind(self.calls, name, value, part or None)
            else:
                _probes.result(self.calls, value)


def _with_tensors(value: Any, tensors: Any) -> Any:
    """Return the value that `_without_tensors` was given."""
    if type(value) is str and value == _TENSOR:
        return next(tensors)
    if type(value) is dict:
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_with_tensors(item, tensors) for item in value])
    return value


# -- called while a graph is compiled ------------------------------------------------------


def _key(number: int, this: int, outer: str = "", name: str = "") -> str:
    """Return the key of a function."""
    known = number, this, outer, name
    if known not in _calls:
        _calls[known] = GraphCall(*known)
    return _calls[known].key


def _container(value: Any) -> int:
    """Return the index of a value without its tensors."""
    if value not in _containers:
        _containers.append(value)
    return _containers.index(value)


def _must_stay(key: str, name: str, cls: str) -> bool:
    """Return whether the graph must not break, and report that a value is not traced if so."""
    for probe in (*_IN_GRAPH.values(), *_probes.ALL):
        private_compiler.skip_frame(probe.__code__)
    stays = private_compiler.must_not_break()
    if stays and (key, name) not in _reported:
        _reported.add((key, name))
        what = f"the value of {name!r}" if name else "what a function returns"
        log.warning(
            "tensortap: %s is not traced, because it is a %s: in a graph compiled with "
            "fullgraph=True, only tensors, and lists and dicts of them, are traced", what, cls,
        )  # fmt: skip
    return stays


def _leave(key: str, event: str, name: str, value: Any, part: str | None) -> None:
    """Report a value outside of the graph, which breaks here."""
    if event == "bind":
        _probes.bind(key, name, value, part)
    else:
        _probes.result(key, value)


for _function in (_key, _container, _must_stay):
    constant_when_compiled(_function)
hide_from_compiler(_leave)


# -- what torch.compile traces -------------------------------------------------------------


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a value with `_TENSOR` for each tensor, which is added to the list."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return _TENSOR
    if type(value) is dict:
        return {key: _without_tensors(item, tensors) for key, item in value.items()}
    if type(value) is list:
        return [_without_tensors(item, tensors) for item in value]
    if type(value) is tuple:
        return tuple([_without_tensors(item, tensors) for item in value])
    return value


def _can_stay(value: Any) -> bool:
    """Return whether a value consists of tensors and constants."""
    if type(value) is dict:
        return all(type(key) in _CONSTANTS and _can_stay(value[key]) for key in value)
    if type(value) in (list, tuple):
        return all(_can_stay(item) for item in value)
    return value is None or isinstance(value, torch.Tensor) or type(value) in _CONSTANTS


def _enter(number: int, this: object) -> Any:
    key = _key(number, id(this) if isinstance(this, torch.nn.Module) else 0)
    graphs.look([], None, key, "enter\n\n\n")
    return key


def _nested(outer: Any, name: str) -> Any:
    if outer is None:
        return None
    key = _key(0, 0, outer, name)
    graphs.look([], None, key, "enter\n\n\n")
    return key


def _report(key: Any, event: str, name: str, value: Any, part: str | None) -> None:
    if _can_stay(value):
        tensors: list[torch.Tensor] = []
        container = _container(_without_tensors(value, tensors))
        graphs.look(tensors, None, key, f"{event}\n{name}\n{part or ''}\n{container}")
    elif not _must_stay(key, name, type(value).__name__):
        _leave(key, event, name, value, part)


def _bind(calls: Any, name: str, value: Any, part: str | None = None) -> Any:
    if calls is not None:
        _report(calls, "bind", name, value, part)
    return value


def _result(calls: Any, value: Any) -> Any:
    if calls is not None:
        _report(calls, "result", "", value, None)
    return value


def _exit(calls: Any) -> None:
    graphs.look([], None, calls, "exit\n\n\n")


_IN_GRAPH: dict[str, Callable[..., Any]] = {
    "enter": _enter, "nested": _nested, "bind": _bind, "result": _result, "exit_": _exit,
}  # fmt: skip
