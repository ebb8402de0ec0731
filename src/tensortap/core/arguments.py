"""Checks of arguments, at the call: each raises an error that names the argument and the value."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin

from tensortap.core.errors import TensortapError
from tensortap.core.record import Kind

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_WORDS = {int: "whole number", float: "number", str: "string", re.Pattern: "compiled pattern"}


def checked(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Check the types of all arguments at the call, as the function is annotated.

    >>> @checked
    ... def film(name: str, fps: float = 20, steps: tuple[int, int] | None = None): ...
    >>> film("fc", steps=3)
    Traceback (most recent call last):
    TypeError: steps must be a pair of whole numbers, got 3
    """
    signature = inspect.signature(function)

    @functools.cache
    def hints() -> dict[str, Any]:
        return {name: _hint(function, each) for name, each in signature.parameters.items()}

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:  # the function says it better
            return function(*args, **kwargs)
        for name, value in given.items():
            _check(name, value, hints()[name])
        return function(*args, **kwargs)

    return call


def _hint(function: Any, parameter: inspect.Parameter) -> Any:
    """Return the type of a parameter; Any if it is known to type checkers only."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return Any
    try:
        return eval(str(parameter.annotation), function.__globals__)  # noqa: S307  our own source
    except Exception:
        return Any


def _check(argument: str, value: Any, hint: Any) -> None:
    if not _fits(value, hint):
        raise TypeError(f"{argument} must be {_words(hint)}, got {value!r:.80}")


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        flag = type(value).__name__ in ("bool", "bool_")  # NumPy has its own
        return any(_fits(value, each) if each is not bool else flag for each in inner)
    if origin is int:
        return hasattr(type(value), "__index__") and not getattr(value, "shape", ())
    if origin is float:
        return hasattr(type(value), "__float__")
    if origin in (Any, bool) or not isinstance(origin, type) or hasattr(origin, "_is_protocol"):
        return True  # anything is true or false, and a protocol says what it needs
    if issubclass(origin, str):  # a Kind is written as text
        return isinstance(value, str)
    if origin is tuple and ... not in inner:
        pair = isinstance(value, (tuple, list)) and len(value) == len(inner)
        return pair and all(map(_fits, value, inner))
    if issubclass(origin, Iterable) and inner and not issubclass(origin, Mapping):
        several = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
        items = value if isinstance(value, (list, tuple, set, frozenset)) else ()
        return several and all(_fits(item, inner[0]) for item in items)
    return isinstance(value, os.PathLike if issubclass(origin, os.PathLike) else origin)


def _words(hint: Any, several: str = "") -> str:
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        kinds = [each for each in inner if each not in (NoneType, Kind if str in inner else None)]
        words = list(dict.fromkeys(_words(each, several) for each in kinds))
        return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)
    if origin is bool:
        return "True or False"
    if origin is collections.abc.Callable:
        return "a function"
    if issubclass(origin, Mapping):
        return "a dict"
    if issubclass(origin, Iterable) and inner and origin is not re.Pattern:
        return f"a {'pair' if len(inner) == 2 else 'list'} of {_words(inner[0], 's')}"
    word = "path" if issubclass(origin, os.PathLike) else _WORDS.get(origin, origin.__name__)
    return f"{word}s" if several else f"a {word}"


def check_whole(argument: str, value: Any) -> int:
    """Return the argument as an integer; raise unless it is a whole number, of any framework."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{argument} must be a whole number, got {value!r:.80}") from None


def check_count(argument: str, value: Any, least: int = 1) -> None:
    """Raise unless the argument is a whole number of at least 1, or `least`."""
    check_whole(argument, value)
    if value < least:
        raise ValueError(f"{argument} must be at least {least}, got {value}")


def check_positive(argument: str, value: Any) -> None:
    """Raise unless the argument is a number greater than 0."""
    _check(argument, value, float)
    if not float(value) > 0:
        raise ValueError(f"{argument} must be greater than 0, got {value}")


def check_seconds(argument: str, value: Any) -> None:
    """Raise unless the argument is a time of at least 0 seconds, or None."""
    _check(argument, value, float | None)
    if value is not None and not float(value) >= 0:
        raise ValueError(f"{argument} must be at least 0 seconds, got {value}")


def check_text(argument: str, value: Any) -> None:
    _check(argument, value, str)


def check_choice(argument: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        *first, last = map(repr, choices)
        raise ValueError(f"{argument} must be {', '.join(first)} or {last}, got {value!r:.80}")


def check_callable(argument: str, value: Any) -> None:
    _check(argument, value, collections.abc.Callable)


def check_path(argument: str, value: Any) -> None:
    _check(argument, value, str | os.PathLike)
    if value == "":
        raise ValueError(f"{argument} must not be empty: '.' is this folder")


def parse_steps(text: str | None) -> tuple[int | None, int | None] | None:
    """Return the first and the last step of ``10:20``, ``10:``, ``:20`` or ``10``; None is all."""
    if not text:
        return None
    first, colon, last = text.partition(":")
    try:
        low = int(first) if first else None
        high = (int(last) if last else None) if colon else low
    except ValueError:
        raise TensortapError(f"steps must be like 10:20, got {text!r}") from None
    if low is not None and high is not None and low > high:
        raise TensortapError(f"steps {text}: the first is after the last")
    return low, high
