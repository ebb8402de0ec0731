"""Checks of arguments that several verbs have in common."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any


def check_count(argument: str, value: Any) -> None:
    """Raise unless the argument is a whole number of at least 1.

    >>> check_count("every", 0)
    Traceback (most recent call last):
    ValueError: every must be at least 1, got 0
    """
    if not isinstance(value, Integral):
        raise TypeError(f"{argument} must be a whole number, got {value!r:.80}")
    if value < 1:
        raise ValueError(f"{argument} must be at least 1, got {value}")


def check_choice(argument: str, value: Any, choices: Sequence[str]) -> None:
    """Raise unless the argument is one of the choices.

    >>> check_choice("mode", "test", ("train", "eval"))
    Traceback (most recent call last):
    ValueError: mode must be 'train' or 'eval', got 'test'
    """
    if value not in choices:
        *first, last = map(repr, choices)
        raise ValueError(f"{argument} must be {', '.join(first)} or {last}, got {value!r:.80}")


def check_callable(argument: str, value: Any) -> None:
    """Raise unless the argument can be called.

    >>> check_callable("transform", 3)
    Traceback (most recent call last):
    TypeError: transform must be callable, got 3
    """
    if not callable(value):
        raise TypeError(f"{argument} must be callable, got {value!r:.80}")


def check_positive(argument: str, value: Any) -> None:
    """Raise unless the argument is a number greater than 0.

    >>> check_positive("timeout", -1.0)
    Traceback (most recent call last):
    ValueError: timeout must be greater than 0, got -1.0
    """
    if not isinstance(value, Real):
        raise TypeError(f"{argument} must be a number, got {value!r:.80}")
    if not float(value) > 0:
        raise ValueError(f"{argument} must be greater than 0, got {value}")
