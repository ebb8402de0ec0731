"""The plain Python function behind whatever a user names, and what is bound in it."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_STORES = frozenset({"STORE_DEREF", "STORE_GLOBAL", "STORE_NAME"})

Common = Callable[[type, str], bool]


class Found:
    """A function, and for calls on which object it is wanted (None: on any)."""

    __slots__ = ("function", "this")

    def __init__(self, function: FunctionType, this: Any) -> None:
        self.function = function
        self.this = this


def plain(value: Any, this: Any = None, name: str | None = None) -> Found | None:
    """The function inside decorators, methods and partials; None where there is no Python in it.

    >>> class A:
    ...     @staticmethod
    ...     def f(x): ...
    >>> plain(A.__dict__["f"], A()).function.__qualname__
    'A.f'
    """
    for _ in range(100):  # decorators may wrap each other in a ring
        if isinstance(value, staticmethod):
            value, this = value.__func__, None
        elif isinstance(value, classmethod):
            value, this = value.__func__, type(this) if not isinstance(this, type) else this
        elif isinstance(value, MethodType):
            value, this = value.__func__, value.__self__
        elif isinstance(value, (functools.partial, functools.partialmethod)):
            value = value.func
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.cached_property):
            value = value.func
        elif hasattr(value, "__wrapped__") and callable(value.__wrapped__):
            value = value.__wrapped__
        elif isinstance(value, FunctionType):
            inner = _closed_over(value, name)
            if inner is None:
                return Found(value, this)
            value = inner
        else:
            return None
    return None


def _closed_over(function: FunctionType, name: str | None) -> Any:
    """What a decorator has wrapped that does not say so: the one function of that name in it."""
    if name is None or function.__name__ == name:
        return None
    held = []
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    named = [one for one in held if callable(one) and getattr(one, "__name__", "") == name]
    return named[0] if len(named) == 1 else None


def attribute(owner: Any, name: str) -> Any:
    """An attribute as it is stored: nothing of the user's runs."""
    return inspect.getattr_static(owner, name, None)


def of_class(value: Any, cls: type, name: str | None = None) -> Found | None:
    """The function that a class has, for calls on whichever object of it."""
    return plain(value, cls if isinstance(value, classmethod) else None, name)


def methods(owner: Any, common: Common | None = None) -> Iterator[tuple[str, Found]]:
    """Every method that the classes of an object define in Python: what ``*`` stands for.

    Methods that Python itself calls (``__init__``) are meant by name alone, but for
    ``__call__``; so are those that are `common` to many classes.
    """
    seen: set[str] = set()
    whole = isinstance(owner, type)
    for cls in (owner if whole else type(owner)).__mro__:
        if cls is object:
            continue
        for name, value in list(vars(cls).items()):
            if name in seen or (name != "__call__" and name[:2] == name[-2:] == "__"):
                continue
            if common is not None and common(cls, name):
                continue
            seen.add(name)
            wrapped = isinstance(value, (staticmethod, classmethod, functools.partialmethod))
            if wrapped or isinstance(value, FunctionType):
                found = of_class(value, owner, name) if whole else plain(value, owner, name)
                if found is not None:
                    yield name, found


@functools.lru_cache(1024)
def names_of(code: CodeType) -> tuple[str, ...]:
    """Every name that a function binds, as its author wrote it: arguments first.

    >>> def f(x, *rest):
    ...     y = [i for i in rest]
    >>> names_of(f.__code__)
    ('x', 'rest', 'i', 'y')
    """
    names = dict.fromkeys(arguments_of(code))
    for code_of_name, argument in _stores(code):
        names[unmangled(argument, code_of_name)] = None
    return tuple(names)


def arguments_of(code: CodeType) -> tuple[str, ...]:
    """The names of the arguments."""
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    names = list(code.co_varnames[:count])
    return tuple([unmangled(name, code) for name in names])


def _stores(code: CodeType) -> Iterator[tuple[CodeType, str]]:
    inner = {id(one): one for one in code.co_consts if isinstance(one, CodeType)}
    for instruction in dis.get_instructions(code):
        if "STORE_FAST" in instruction.opname or instruction.opname in _STORES:
            values = instruction.argval
            for value in values if isinstance(values, tuple) else (values,):
                if isinstance(value, str) and not value.startswith((".", "__tensortap")):
                    yield code, value
        elif id(instruction.argval) in inner:
            nested = inner[id(instruction.argval)]
            if nested.co_name in COMPREHENSIONS:
                yield from _stores(nested)


def nested(code: CodeType, name: str) -> CodeType | None:
    """The code of a function that is defined inside another one."""
    for one in code.co_consts:
        if isinstance(one, CodeType):
            if one.co_name == name:
                return one
            if one.co_name in COMPREHENSIONS and (found := nested(one, name)) is not None:
                return found
    return None


def unmangled(name: str, code: CodeType) -> str:
    """The name as it stands in the source: inside a class ``__x`` is compiled to ``_Class__x``."""
    if not name.startswith("_") or "__" not in name[1:]:
        return name
    prefix, _, rest = name.partition("__")
    if not prefix or not rest or rest.endswith("__"):
        return name
    qualname = getattr(code, "co_qualname", None)  # since Python 3.11
    if qualname is not None and prefix.lstrip("_") not in [
        part.lstrip("_") for part in qualname.split(".")
    ]:
        return name
    return f"__{rest}"


def mangled(name: str, code: CodeType) -> str:
    """The name that code has for one in its source."""
    if not name.startswith("__") or name.endswith("__"):
        return name
    known = (*code.co_varnames, *code.co_cellvars, *code.co_freevars, *code.co_names)
    return next((one for one in known if one != name and unmangled(one, code) == name), name)
