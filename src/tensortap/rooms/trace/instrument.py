"""Instrumented functions: they run other code while somebody listens to them.

The code is compiled again from the source file. The whole file is compiled, so that closures,
``super()``, decorators and line numbers stay correct; only the one function differs. If the
unchanged file does not compile to the code that runs, the file has been edited and is not used.
"""

from __future__ import annotations

import ast
import copy
import functools
import linecache
import os
import threading
import weakref
from types import CodeType, FunctionType
from typing import Any

from tensortap.capture.names import code_objects, contains_code
from tensortap.rooms.trace.functions import NoSource
from tensortap.rooms.trace.probes import PROBES, FunctionListeners, Listener
from tensortap.rooms.trace.rewrite import (
    ENTER,
    FUNCTIONS,
    TRACED_IDS,
    Function,
    ProbeSpec,
    insert_probes,
)


class InstrumentedFunction:
    """One function and its listeners; it does not keep the function alive."""

    def __init__(self, function: FunctionType) -> None:
        self._function = weakref.ref(function)
        self.listeners = FunctionListeners()
        self._original: CodeType = function.__code__
        self._given: CodeType | None = None
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
        else:
            spec, for_anyone = self._spec | spec, for_anyone or self._for_anyone
            if (spec, for_anyone) == (self._spec, self._for_anyone):
                return
        names, number = self.function().__globals__, self.listeners.number
        code = instrumented_code(self._original, names, spec, number, for_anyone)
        names.update(PROBES)
        names[TRACED_IDS.format(number)] = self.listeners.by_object
        self.function().__code__ = self._given = code
        self._spec, self._for_anyone = spec, for_anyone

    def restore(self) -> None:
        function = self._function()
        if function is not None and function.__code__ is self._given:
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


def listen(function: FunctionType, this: Any, listener: Listener, spec: ProbeSpec) -> None:
    """Tell a listener about calls of a function on the object `this` (None: about all calls).

    Raises NoSource if the function cannot be instrumented.
    """
    with _lock:
        found = _instrumented.get(function)
        if found is None:
            found = _instrumented[function] = InstrumentedFunction(function)
        found.instrument(spec, this is None)
        found.listeners.add(listener, this)


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


# -- compiling -----------------------------------------------------------------------------


def instrumented_code(
    code: CodeType, names: dict[str, Any], spec: ProbeSpec, number: int, anyone: bool = True
) -> CodeType:
    """Return the code of a function with probes; `number` identifies the function in them.

    `names` are the globals of its module, which may know where its source is. Unless `anyone`,
    the code first checks that it is called on an object that somebody traces.
    """
    tree, compiled = _parsed_file(code.co_filename, names)
    if not contains_code(compiled, code):
        raise NoSource(f"{code.co_filename} has been edited since it was loaded")
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS) and _starts(node, code):
            return _compile_with_probes(tree, node, code, spec, number, anyone)
    raise NoSource(
        f"no function defined with def starts at line {code.co_firstlineno} of {code.co_filename}"
    )


def _compile_with_probes(
    tree: ast.Module, node: Function, code: CodeType, spec: ProbeSpec, number: int, anyone: bool
) -> CodeType:
    body = node.body
    node.body = insert_probes(copy.deepcopy(node), spec, number, anyone).body
    try:
        compiled = compile(tree, code.co_filename, "exec", dont_inherit=True)
    finally:
        node.body = body
    for one in code_objects(compiled):
        if ENTER in one.co_names and one.co_firstlineno == code.co_firstlineno:
            if one.co_freevars == code.co_freevars:
                return one
    raise NoSource(f"{code.co_name} has other free variables when compiled again")


def _parsed_file(name: str, names: dict[str, Any]) -> tuple[ast.Module, CodeType]:
    linecache.checkcache(name)
    text = "".join(linecache.getlines(name, names))
    if not text:
        raise NoSource(f"{name} has no source")
    try:
        return _parse(name, text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise NoSource(f"{name} cannot be compiled: {error}") from None


@functools.lru_cache(16)
def _parse(name: str, text: str) -> tuple[ast.Module, CodeType]:
    tree = ast.parse(text, name)
    return tree, compile(tree, name, "exec", dont_inherit=True)


def clear_cache() -> None:
    """Release the parsed files: trees take a lot of memory."""
    _parse.cache_clear()


def _starts(node: Function, code: CodeType) -> bool:
    """Return whether the node has the name and the first line of the code."""
    first = min([node.lineno, *[one.lineno for one in node.decorator_list]])
    return node.name == code.co_name and first == code.co_firstlineno
