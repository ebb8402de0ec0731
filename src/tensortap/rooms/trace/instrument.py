"""Instrumented functions: they run other code while somebody listens to them.

The code is compiled again from the source file. The whole file is compiled, so that closures,
``super()``, decorators and line numbers stay correct; only the one function differs. If the
unchanged file does not compile to the code that runs, the file has been edited and is not used.

The probes that the code calls are globals of the user's module. They stay there, because a
suspended generator or another thread may return to instrumented code at any time.
"""

from __future__ import annotations

import ast
import copy
import functools
import linecache
import os
import threading
import weakref
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeAlias

from tensortap.capture.names import code_objects, contains_code
from tensortap.rooms.trace import rewrite
from tensortap.rooms.trace.resolve import NoSource
from tensortap.rooms.trace.rewrite import FUNCTIONS, Function, ProbeSpec, insert_probes
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


class InstrumentedFunction:
    """One function, its listeners and the code that it runs for them.

    It does not keep the function alive; whoever listens does. The code refers to it by `number`.
    """

    def __init__(self, function: FunctionType) -> None:
        self._function = weakref.ref(function)
        self.number = len(_numbered)
        self.by_object = ListenersByObject()
        self.anyone: tuple[Listener, ...] = ()  # listeners to calls on any object
        self.objects: dict[Listener, Any] = {}  # what each listens to, None: to all calls
        self._original: CodeType = function.__code__
        self._given: CodeType | None = None
        self._spec: ProbeSpec | None = None  # what is reported; None if not instrumented
        self._for_anyone = False
        _numbered.append(self)

    def add(self, listener: Listener, this: Any) -> None:
        """Add a listener to calls on the object `this` (None: to all calls)."""
        self.objects[listener] = this
        if this is None:
            self.anyone = (*self.anyone, listener)
            for key, group in list(self.by_object.items()):
                self.by_object[key] = (*group, listener)
        else:
            self.by_object[id(this)] = (*self.of(this), listener)

    def remove(self, listener: Listener) -> None:
        """Remove a listener; after the last one the function runs its own code again."""
        this = self.objects.pop(listener)
        self.anyone = tuple([one for one in self.anyone if one is not listener])
        for key in [id(this)] if this is not None else list(self.by_object):
            left = tuple([one for one in self.by_object.get(key, ()) if one is not listener])
            if left == self.anyone:
                self.by_object.pop(key, None)
            else:
                self.by_object[key] = left
        if not self.objects:  # else the code stays: compiling again costs more than it saves
            function = self._function()
            if function is not None and function.__code__ is self._given:
                function.__code__ = self._original  # unless somebody else has replaced it meanwhile
            self._spec = None

    def of(self, this: object) -> tuple[Listener, ...]:
        return self.by_object.get(id(this), self.anyone)

    def instrument(self, function: FunctionType, spec: ProbeSpec, for_anyone: bool) -> None:
        """Make the function report this as well; raise NoSource if it cannot."""
        if self._spec is None:
            self._original = function.__code__
        else:
            spec, for_anyone = self._spec | spec, for_anyone or self._for_anyone
            if (spec, for_anyone) == (self._spec, self._for_anyone):
                return
        names = function.__globals__
        code = instrumented_code(self._original, names, spec, self.number, for_anyone)
        names.update(PROBES)
        names[rewrite.TRACED_IDS.format(self.number)] = self.by_object
        function.__code__ = self._given = code
        self._spec, self._for_anyone = spec, for_anyone


_numbered: list[InstrumentedFunction] = []
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
        found.instrument(function, spec, this is None)
        found.add(listener, this)


def unlisten(function: FunctionType, listener: Listener) -> None:
    """Remove a listener; without listeners the function runs its own code again."""
    with _lock:
        found = _instrumented.get(function)
        if found is not None and listener in found.objects:
            found.remove(listener)


def instrumented() -> list[FunctionType]:
    """Return the functions that somebody listens to now."""
    return [function for function, one in _instrumented.items() if one.objects]


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
        if rewrite.ENTER in one.co_names and one.co_firstlineno == code.co_firstlineno:
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


# -- probes -------------------------------------------------------------------------------


def enter(number: int, this: object) -> Calls | None:
    """Begin a call of a function; return None if nobody traces it."""
    if number >= len(_numbered):
        return None  # the function was instrumented in another process and sent here
    calls: Calls = []
    for listener in _numbered[number].of(this):
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
    for listener in list(_numbered[number].objects) if number < len(_numbered) else ():
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
