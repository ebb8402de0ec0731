"""Paths resolved against a target: which functions to trace, for which names that they bind."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from tensortap.core.errors import TensortapError
from tensortap.rooms.trace.paths import ANY, join, nearest

RETURN = "return"
COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_STORES = frozenset({"STORE_FAST", "STORE_DEREF", "STORE_GLOBAL", "STORE_NAME"})

Segments = tuple[str, ...]
IsCommon = Callable[[type, str], bool]


class NoSource(TensortapError):
    """A function cannot be compiled again from its source, with the reason."""


class BoundFunction(NamedTuple):
    """A function, and the object that it must be called on (None: any)."""

    function: FunctionType
    this: Any


def unwrap(value: Any, this: Any = None) -> BoundFunction | None:
    """Return the function inside decorators, methods and partials; None if it is not Python."""
    for _ in range(100):  # decorators may wrap each other in a cycle
        if isinstance(value, staticmethod):
            value, this = value.__func__, None
        elif isinstance(value, classmethod):
            value, this = value.__func__, this if isinstance(this, type) else type(this)
        elif isinstance(value, MethodType):
            value, this = value.__func__, value.__self__
        elif isinstance(
            value, (functools.partial, functools.partialmethod, functools.cached_property)
        ):
            value = value.func
        elif isinstance(value, property):
            value = value.fget
        elif hasattr(value, "__wrapped__") and callable(value.__wrapped__):
            value = value.__wrapped__
        elif isinstance(value, FunctionType):
            return BoundFunction(value, this)
        else:
            return None
    return None


def method(owner: Any, name: str) -> BoundFunction | None:
    """Return the function that ``owner.name(...)`` runs, without running code of the user."""
    if not isinstance(owner, type):
        own = getattr(owner, "__dict__", {}).get(name)
        if own is not None:  # a function in an attribute is called without the object
            return unwrap(own) if callable(own) else None
    return _unwrap_member(inspect.getattr_static(owner, name, None), owner)


def _unwrap_member(value: Any, owner: Any) -> BoundFunction | None:
    """Return the function behind a class member, for calls on `owner` or, of a class, on any."""
    any_object = isinstance(owner, type) and not isinstance(value, classmethod)
    return unwrap(value, None if any_object else owner)


def methods(owner: Any, is_common: IsCommon | None = None) -> Iterator[tuple[str, BoundFunction]]:
    """Yield every Python method of the classes of an object, which ``*`` stands for.

    Special methods other than ``__call__``, and methods that are common to many classes, are
    left out: they must be named.
    """
    seen: set[str] = set()
    for cls in (owner if isinstance(owner, type) else type(owner)).__mro__:
        for name, value in list(vars(cls).items()) if cls is not object else ():
            if name in seen or (name != "__call__" and name[:2] == name[-2:] == "__"):
                continue
            if is_common is not None and is_common(cls, name):
                continue
            seen.add(name)
            if isinstance(
                value, (FunctionType, staticmethod, classmethod, functools.partialmethod)
            ):
                bound = _unwrap_member(value, owner)
                if bound is not None:
                    yield name, bound


@functools.lru_cache(1024)
def bound_names(code: CodeType) -> tuple[str, ...]:
    """Return every name that a function binds, as written in its source, arguments first."""
    return tuple(dict.fromkeys((*argument_names(code), *_stored_names(code))))


def argument_names(code: CodeType) -> tuple[str, ...]:
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return tuple([_unmangled(name, code) for name in code.co_varnames[:count]])


def _stored_names(code: CodeType) -> Iterator[str]:
    nested_codes = {id(one): one for one in code.co_consts if isinstance(one, CodeType)}
    for instruction in dis.get_instructions(code):
        for name in _stored_by(instruction):
            if not name.startswith((".", "__tensortap")):
                yield _unmangled(name, code)
        nested_code = nested_codes.get(id(instruction.argval))
        if nested_code is not None and nested_code.co_name in COMPREHENSIONS:
            yield from _stored_names(nested_code)


def _stored_by(instruction: dis.Instruction) -> tuple[str, ...]:
    if instruction.opname in _STORES:
        return (instruction.argval,)
    if instruction.opname == "STORE_FAST_STORE_FAST":
        return tuple(instruction.argval)
    return instruction.argval[:1] if instruction.opname == "STORE_FAST_LOAD_FAST" else ()


def _unmangled(name: str, code: CodeType) -> str:
    """Return a name as written in the source: in a class, ``__x`` is compiled to ``_Class__x``."""
    prefix, _, rest = name.partition("__")
    classes = [part.lstrip("_") for part in code.co_qualname.split(".")]
    mangled = prefix.startswith("_") and rest and not rest.endswith("__")
    return f"__{rest}" if mangled and prefix.lstrip("_") in classes else name


@dataclass(frozen=True, eq=False)
class TracedFunction:
    """A function whose calls are traced, on the object `this` or (None) on any."""

    function: FunctionType
    this: Any
    path: Segments

    @property
    def label(self) -> str:
        return join(self.path) or self.function.__qualname__


@dataclass(eq=False)
class LocalProbe:
    """One name in one function (None: its result), and the path to follow inside its value.

    The other attributes say what it has reported so far.
    """

    traced: TracedFunction
    name: str | None
    path: Segments
    inside: Segments
    bound: int = 0
    kept: int = 0
    error: Exception | None = None
    parts: Segments = ()  # of a value that lacks what is inside the path

    def __post_init__(self) -> None:
        self.label = join(self.path)


class Resolver:
    """Finds what paths stand for in one target.

    `children` returns the parts of an object that are searched like the object itself;
    ``*`` leaves out methods for which `is_common` is true; `closed` returns why the functions of
    an object cannot be traced, or None.
    """

    def __init__(
        self,
        target: Any,
        children: Callable[[Any], Mapping[str, Any]],
        is_common: IsCommon | None = None,
        closed: Callable[[Any], str | None] = lambda owner: None,
    ) -> None:
        self.target = target
        self._children = children
        self._is_common = is_common
        self._closed = closed
        self._traced: dict[tuple[int, int, Segments], TracedFunction] = {}
        self._misses: list[tuple[int, str]] = []  # depth of the path, message
        self._holders: dict[int, set[int]] = {}  # of each attribute, by id

    def resolve(self, segments: Segments) -> tuple[list[LocalProbe], str]:
        """Return the probes that a path stands for, and if there are none, the reason."""
        self._misses = []
        bound = unwrap(self.target) if callable(self.target) else None
        children = self._children(self.target)
        if (reason := self._closed(self.target)) is not None and not children:
            return [], reason
        if inspect.isroutine(self.target) and bound is None:
            return [], f"{self.target!r} is not written in Python, so it has no locals"
        if bound is not None and not children:
            probes = self._in_function(self._trace(bound, ()), segments)
        else:
            probes = self._in_object(self.target, segments, ())
        unique = {(probe.path, probe.inside): probe for probe in probes}
        # where the path led farthest
        farthest = max(self._misses, key=lambda miss: miss[0], default=(0, "nothing matches"))
        return list(unique.values()), "" if unique else farthest[1]

    def _trace(self, bound: BoundFunction, path: Segments) -> TracedFunction:
        # the path is part of the key: one module under two names is traced under both
        key = (id(bound.function), id(bound.this), path)
        return self._traced.setdefault(key, TracedFunction(*bound, path))

    def _miss(self, path: Segments, message: str) -> None:
        self._misses.append((len(path), message))

    # -- objects -------------------------------------------------------------------------

    def _in_object(self, owner: Any, segments: Segments, path: Segments) -> Iterator[LocalProbe]:
        children, closed = self._children(owner), self._closed(owner)
        if closed is not None and not (segments and segments[0] in (*children, ANY)):
            self._miss((*path, *segments[:1]), f"{join(path) or 'the model'}: {closed}")
            return
        if not segments:
            yield from self._result_of(owner, path)
            return
        first, rest = segments[0], segments[1:]
        if first != ANY:
            yield from self._named(owner, children, first, rest, path)
            return
        for name, child in children.items():
            yield from self._in_object(child, rest, (*path, name))
        for name, bound in methods(owner, self._is_common):
            yield from self._in_function(self._trace(bound, (*path, name)), rest, quiet=True)

    def _result_of(self, owner: Any, path: Segments) -> Iterator[LocalProbe]:
        """Yield the result of calling an object: of its ``forward`` or ``__call__``."""
        for name in ("forward", "__call__"):
            if (bound := method(owner, name)) is not None:
                here = path or (name,)  # the target itself has no name
                yield LocalProbe(self._trace(bound, here), None, here, ())
                return
        self._miss(path, f"{join(path)} is neither a function nor a module")

    def _named(
        self,
        owner: Any,
        children: Mapping[str, Any],
        name: str,
        rest: Segments,
        path: Segments,
    ) -> Iterator[LocalProbe]:
        here = (*path, name)
        if name in children:
            yield from self._in_object(children[name], rest, here)
            return
        bound = method(owner, name)
        if bound is not None:
            yield from self._in_function(self._trace(bound, here), rest)
            return
        attribute = _attribute(owner, name)
        if attribute is not None and rest and (holders := self._holders_of(attribute)) > 1:
            self._miss(
                (*here, *rest),
                f"{holders} objects share {join(here)}, so that its calls cannot be told apart: "
                "trace the method that calls it",
            )
            return
        if attribute is not None and rest:
            yield from self._in_object(attribute, rest, here)
            return
        own = dict(methods(owner, self._is_common))
        if attribute is not None:
            message = f"{join(here)} is a value, not a function"
            if own:
                via = "forward" if "forward" in own else next(iter(own))
                this = next(iter(argument_names(own[via].function.__code__)), "")
                message += f": its value at each call is {join((*path, via, this, name))!r}"
            self._miss(here, message)
        elif hasattr(type(owner), name):
            self._miss(here, f"{join(here)} is not a function written in Python")
        else:
            where = join(path) or type(owner).__name__
            available = nearest(name, [*children, *own])
            self._miss(here, f"no module or method {name!r} in {where}; {available}")

    def _holders_of(self, attribute: Any) -> int:
        """Return how many objects of the target have the same attribute."""
        if not self._holders:
            self._note_holders(self.target, set())
        return len(self._holders.get(id(attribute), ()))

    def _note_holders(self, owner: Any, known: set[int]) -> None:
        if id(owner) not in known:
            known.add(id(owner))
            for value in getattr(owner, "__dict__", {}).values():
                self._holders.setdefault(id(value), set()).add(id(owner))
            for child in self._children(owner).values():
                self._note_holders(child, known)

    # -- functions -----------------------------------------------------------------------

    def _in_function(
        self, traced: TracedFunction, segments: Segments, quiet: bool = False
    ) -> Iterator[LocalProbe]:
        """Yield the probes in a function; with `quiet`, a wildcard led here: misses are normal."""
        code, path = traced.function.__code__, traced.path
        if not segments:
            yield LocalProbe(traced, None, path or (RETURN,), ())
            return
        first, rest = segments[0], segments[1:]
        names = bound_names(code)
        if first == RETURN:
            yield LocalProbe(traced, None, (*path, RETURN), rest)
        elif first == ANY:
            # not the object itself: that would copy the whole model at each call
            this = code.co_varnames[:1] if not rest and traced.this is not None else ()
            for name in names if not quiet else ():
                if name not in this:
                    yield LocalProbe(traced, name, (*path, name), rest)
        elif first in names:
            yield LocalProbe(traced, first, (*path, first), rest)
        elif first == "self" and traced.this is not None and code.co_argcount:
            # whatever the method calls the object
            yield LocalProbe(traced, names[0], (*path, first), rest)
        elif not quiet:
            message = f"no local {first!r} in {traced.label}; {nearest(first, names)}"
            called = traced.function.__globals__.get(first)
            if isinstance(called, FunctionType):
                name = f"{called.__module__}.{called.__qualname__}"
                message += f". To trace what it calls: tap.trace({name}, …)"
            self._miss(path, message)


def items(owner: Any) -> Mapping[str, Any]:
    """Return the items of a list or a dict by index or key; nothing for other objects."""
    if isinstance(owner, Mapping):
        return {str(key): item for key, item in owner.items()}
    if isinstance(owner, (list, tuple)):
        return {str(index): item for index, item in enumerate(owner)}
    return {}


def _attribute(owner: Any, name: str) -> Any:
    """Return an attribute of an object, or a parameter or buffer of a torch module."""
    own = getattr(owner, "__dict__", {})
    if name in own:
        return own[name]
    tables = [own.get(table) for table in ("_parameters", "_buffers")]
    return next((one[name] for one in tables if isinstance(one, dict) and name in one), None)
