"""Instrumented functions: they run other code while somebody listens to them.

There are two mechanisms: code compiled again from the source file, and `sys.monitoring` (Python
3.12 and later) where there is no usable source.
"""

from __future__ import annotations

import os
import threading
import weakref
from types import CodeType, FunctionType
from typing import Any

from tensortap.sources.tracing import monitor, source
from tensortap.sources.tracing.probes import PROBES, FunctionListeners, Listener
from tensortap.sources.tracing.rewrite import TRACED_IDS, ProbeSpec, union
from tensortap.sources.tracing.source import NoSource


class InstrumentedFunction:
    """One function and its listeners; it does not keep the function alive."""

    def __init__(self, function: FunctionType) -> None:
        self._function = weakref.ref(function)
        self.listeners = FunctionListeners()
        self._original: CodeType = function.__code__
        self._given: CodeType | None = None  # None if it is monitored
        self._spec: ProbeSpec | None = None  # what is reported; None if not instrumented
        self._for_anyone = False  # whatever object it is called on

    def function(self) -> FunctionType:
        """Return the function; whoever listens to it keeps it alive."""
        function = self._function()
        assert function is not None
        return function

    def instrument(self, spec: ProbeSpec, for_anyone: bool) -> None:
        """Make the function report this as well; raise NoSource if it cannot."""
        if self._spec is None:
            self._original = self.function().__code__
            wider = spec
        else:
            wider = union([self._spec, spec])
            for_anyone = for_anyone or self._for_anyone
            if (wider, for_anyone) == (self._spec, self._for_anyone):
                return
        if self._spec is not None and self._given is None:
            monitor.watch(self._original, self.listeners.number, wider)
        else:
            try:
                self._compile(wider, for_anyone)
            except NoSource as error:
                if self._spec is not None:
                    raise
                monitor.check(self._original, wider, error)
                monitor.watch(self._original, self.listeners.number, wider)
                self._given = None
        self._spec, self._for_anyone = wider, for_anyone

    def _compile(self, spec: ProbeSpec, for_anyone: bool) -> None:
        names, number = self.function().__globals__, self.listeners.number
        code = source.instrumented_code(self._original, names, spec, number, for_anyone)
        names.update(PROBES)
        names[TRACED_IDS.format(number)] = self.listeners.by_object
        self.function().__code__ = self._given = code

    def restore(self) -> None:
        """Let the function run its own code again."""
        function = self._function()
        if self._given is None:
            monitor.forget(self._original)
        elif function is not None and function.__code__ is self._given:
            function.__code__ = self._original  # unless somebody else has replaced it meanwhile
        self._spec = None


_instrumented: weakref.WeakKeyDictionary[FunctionType, InstrumentedFunction] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.RLock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def listen(function: FunctionType, this: Any, listener: Listener, spec: ProbeSpec) -> int:
    """Tell a listener about calls of a function on the object `this` (None: about all calls).

    Returns the number of the function. Raises NoSource if the function cannot be instrumented.
    """
    with _lock:
        found = _instrumented.get(function)
        if found is None:
            found = _instrumented[function] = InstrumentedFunction(function)
        found.instrument(spec, this is None)
        found.listeners.add(listener, this)
        return found.listeners.number


def unlisten(function: FunctionType, listener: Listener) -> None:
    """Remove a listener; without listeners the function runs its own code again."""
    with _lock:
        found = _instrumented.get(function)
        if found is None or listener not in found.listeners:
            return
        found.listeners.remove(listener)
        if not found.listeners:  # else the code stays: compiling again costs more than it saves
            found.restore()


def instrumented() -> list[FunctionType]:
    """Return the functions that somebody listens to now."""
    return [function for function, one in _instrumented.items() if one.listeners]
