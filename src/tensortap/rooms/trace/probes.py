"""Probes that instrumented functions call, and the listeners that they report to.

The probes are globals of the user's module. They stay there, because a suspended generator or
another thread may return to instrumented code at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from tensortap.rooms.trace import rewrite
from tensortap.values.torch.hidden import (
    constant_when_compiled,
    hide_from_compiler,
    replace_when_compiled,
)

# A listener has `call()`, which begins a call of the function, `compiled()` and `fault(error)`.
# What `call` returns has `bind`, `result` and `fault`.
Listener: TypeAlias = Any
Calls: TypeAlias = list[Any]


class ListenersByObject(dict[int, tuple[Listener, ...]]):
    """Listeners to calls on an object, by its id.

    This is a global of the user's module. Some programs send functions with their globals to
    other processes by value: there it is empty.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[type[ListenersByObject], tuple[()]]:
        return ListenersByObject, ()


class FunctionListeners:
    """The listeners of one function; its code refers to it by `number`."""

    def __init__(self) -> None:
        self.number = len(_functions)
        self.by_object = ListenersByObject()
        self.anyone: tuple[Listener, ...] = ()
        self._objects: dict[Listener, Any] = {}  # what each listens to, None: to all calls
        _functions.append(self)

    def __bool__(self) -> bool:
        return bool(self._objects)

    def __contains__(self, listener: Listener) -> bool:
        return listener in self._objects

    def add(self, listener: Listener, this: Any) -> None:
        """Add a listener to calls on the object `this` (None: to all calls)."""
        self._objects[listener] = this
        if this is None:
            self.anyone = (*self.anyone, listener)
            for key, group in list(self.by_object.items()):
                self.by_object[key] = (*group, listener)
        else:
            self.by_object[id(this)] = (*self.of(this), listener)

    def remove(self, listener: Listener) -> None:
        this = self._objects.pop(listener)
        self.anyone = tuple([one for one in self.anyone if one is not listener])
        for key in [id(this)] if this is not None else list(self.by_object):
            left = tuple([one for one in self.by_object.get(key, ()) if one is not listener])
            if left == self.anyone:
                self.by_object.pop(key, None)
            else:
                self.by_object[key] = left

    def all(self) -> list[Listener]:
        return list(self._objects)

    def of(self, this: object) -> tuple[Listener, ...]:
        return self.by_object.get(id(this), self.anyone)


_functions: list[FunctionListeners] = []


def enter(number: int, this: object) -> Calls | None:
    """Begin a call of a function; return None if nobody traces it."""
    if number >= len(_functions):
        return None  # the function was instrumented in another process and sent here
    calls: Calls = []
    for listener in _functions[number].of(this):
        try:
            call = listener.call()
        except Exception as error:
            listener.fault(error)
            continue
        if call is not None:
            calls.append(call)
    return calls or None


def bind(calls: Calls | None, name: str, value: Any, part: str | None = None) -> Any:
    """Report a binding; return the value."""
    for call in calls or ():
        try:
            call.bind(name, value, part)
        except Exception as error:
            call.fault(error)
    return value


def result(calls: Calls | None, value: Any) -> Any:
    """Report a value that is returned or yielded; return the value."""
    for call in calls or ():
        try:
            call.result(value)
        except Exception as error:
            call.fault(error)
    return value


def without_probes(names: Any) -> Any:
    """Remove our names from what ``locals()``, ``vars()`` or ``dir()`` returned."""
    for name in [name for name in names if name.startswith("__tensortap_")]:
        if isinstance(names, dict):
            del names[name]
        else:
            names.remove(name)
    return names


PROBES: dict[str, Callable[..., Any]] = {
    rewrite.ENTER: enter,
    rewrite.BIND: bind,
    rewrite.BIND_ALWAYS: bind,
    rewrite.RESULT: result,
    rewrite.LOCALS: without_probes,
    rewrite.ID: id,
}
hide_from_compiler(without_probes)


# -- in graphs of torch.compile, where nothing is traced ------------------------------------


def _report_compiled(number: int) -> None:
    # a function that was instrumented in another process and sent here has no listeners
    for listener in _functions[number].all() if number < len(_functions) else ():
        listener.compiled()


def _enter_in_graph(number: int, this: object) -> None:
    _report_compiled(number)


def _bind_in_graph(calls: object, name: str, value: Any, part: str | None = None) -> Any:
    return value


def _result_in_graph(calls: object, value: Any) -> Any:
    return value


constant_when_compiled(_report_compiled)
replace_when_compiled(enter, _enter_in_graph)
replace_when_compiled(bind, _bind_in_graph)
replace_when_compiled(result, _result_in_graph)
