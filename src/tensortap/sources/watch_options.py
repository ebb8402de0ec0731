"""What `watch` is told: checked before anything is begun, in the words of who told it."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from tensortap.sources.observer import TrackOptions
from tensortap.sources.patterns import NamePattern

_WHAT = ("outputs", "gradients", "both")


def check_functions(function: Any, on_close: Any, transform: Any) -> None:
    """What is to be called can be."""
    for given, of in ((function, "a record"), (on_close, "nothing"), (transform, "a tensor")):
        if given is not None and not callable(given):
            raise TypeError(f"{given!r:.80} cannot be called: give a function of {of}")
    if isinstance(function, type):
        called = f"{function.__name__}(...)"
        raise TypeError(f"{function.__name__} is a class: give one that was made, {called}")


_FOR_TARGETS = ("targets", "name", "what", "transform", "include", "exclude")


def refuse_to_change(name: str, given: dict[str, Any], usual: inspect.Signature) -> None:
    """Whoever attaches to a watcher cannot tell it anew how it works."""
    for option, parameter in usual.parameters.items():
        if option not in _FOR_TARGETS and given[option] != parameter.default:
            raise TypeError(
                f"{option}={given[option]!r}: the watcher {name!r} runs already, with its own; "
                "give another name to start one"
            )


def settings_of(
    what: str | None, include: NamePattern, exclude: NamePattern, other: TrackOptions
) -> TrackOptions:
    """What hooks are to observe; what is not said is as in `other`."""
    if what is not None:
        if what not in _WHAT:
            raise ValueError(f"what={what!r}: it is one of {', '.join(_WHAT)}")
        outputs, gradients = what != "gradients", what != "outputs"
        other = other._replace(activations=outputs, gradients=gradients)
    return other._replace(
        include=other.include if include is None else include,
        exclude=other.exclude if exclude is None else exclude,
    )


def check_options(rate: Any, processes: Any, timeout: Any, name: Any) -> None:
    """Numbers are numbers, and not too small."""
    if rate is not None and (not isinstance(rate, numbers.Real) or not float(rate) > 0):
        raise ValueError(f"rate={rate!r}: so many records a second of each name, or None")
    if not isinstance(processes, numbers.Integral) or processes < 1:
        raise ValueError(f"processes={processes!r}: a whole number, 1 or more")
    if not isinstance(timeout, numbers.Real) or not float(timeout) > 0:
        raise ValueError(f"timeout={timeout!r}: seconds, more than 0")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name={name!r}: a watcher is called by a string")


def titled(targets: Any) -> list[tuple[str, Any]]:
    """Each target with what goes before its names."""
    if isinstance(targets, Mapping):
        for title in targets:
            if not isinstance(title, str) or not title:
                raise TypeError(f"targets are named by strings, not by {title!r}")
        return list(targets.items())
    if isinstance(targets, (list, tuple)):
        return [(f"{type(target).__name__}{i}", target) for i, target in enumerate(targets)]
    return [("", targets)]


def ranks_of(wanted: Any) -> frozenset[int] | None:
    """The ranks that watch; None is all of them."""
    if wanted == "all":
        return None
    found = (
        [wanted] if isinstance(wanted, (int, str)) or not isinstance(wanted, Iterable) else wanted
    )
    found = frozenset(found)
    if not all(isinstance(rank, int) for rank in found):
        raise TypeError(f"ranks={wanted!r}: a rank, several of them, or 'all'")
    return found
