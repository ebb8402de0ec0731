"""Iterators that a step function reads by itself: nobody can run such a step again."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

_FUNCTIONS = 200  # that are looked at


def iterators_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of the iterators that a function, or one that it calls, refers to."""
    found: dict[str, None] = {}
    waiting: list[Any] = [function]
    seen: set[int] = set()
    while waiting and len(seen) < _FUNCTIONS:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        for name, value in _referred(each):
            if isinstance(value, (FunctionType, MethodType, functools.partial)):
                waiting.append(value)
            elif isinstance(value, Iterator) and not isinstance(value, io.IOBase):
                found[name] = None
    return list(found)


def _referred(function: Any) -> list[tuple[str, Any]]:
    """Return the values to which a function of the user refers, with their names."""
    if isinstance(function, functools.partial):
        return [("", function.func)]
    own: dict[str, Any] = {}
    if isinstance(function, MethodType):
        own = getattr(function.__self__, "__dict__", {})
        function = function.__func__
    if not isinstance(function, FunctionType) or _is_library(function):
        return []
    names = _names_in(function.__code__)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values = {name: own[name] for name in names if name in own}
    values |= {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, cell in cells:
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not bound yet
            continue
    return list(values.items())


def _is_library(function: FunctionType) -> bool:
    package = (function.__module__ or "").partition(".")[0]
    return package in sys.stdlib_module_names or package in ("torch", "jax", "numpy", "tensortap")


def _names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a function and those within it."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))
