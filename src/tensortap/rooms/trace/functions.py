"""The Python function behind what a user names, and the names that it binds."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from tensortap.core.errors import TensortapError

COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_STORES = frozenset({"STORE_FAST", "STORE_DEREF", "STORE_GLOBAL", "STORE_NAME"})

IsCommon = Callable[[type, str], bool]


class NoSource(TensortapError):
    """A function cannot be compiled again from its source, with the reason."""


class BoundFunction(NamedTuple):
    """A function, and the object that it must be called on (None: any)."""

    function: FunctionType
    this: Any


def unwrap(value: Any, this: Any = None) -> BoundFunction | None:
    """Return the function inside decorators, methods and partials; None if it is not Python.

    >>> class A:
    ...     @staticmethod
    ...     def f(x): ...
    >>> unwrap(A.__dict__["f"], A()).function.__qualname__
    'A.f'
    """
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
    """Return every name that a function binds, as written in its source, arguments first.

    >>> def f(x, *rest):
    ...     y = [i for i in rest]
    >>> bound_names(f.__code__)
    ('x', 'rest', 'i', 'y')
    """
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
