"""Which names of which kinds are wanted, as regular expressions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeAlias

from tensortap.record import Kind

Wanted: TypeAlias = str | re.Pattern[str] | Mapping[str, str | re.Pattern[str]] | None

_WORDS = {
    "activations": Kind.ACTIVATION,
    "gradients": Kind.GRADIENT,
    "weights": Kind.WEIGHT,
    "weight_gradients": Kind.WEIGHT_GRADIENT,
    "optimizer_state": Kind.OPTIMISER_STATE,
    "optimiser_state": Kind.OPTIMISER_STATE,
}


class Patterns:
    """Tells whether a name of a kind is wanted; asked once a name, the answer is remembered.

    >>> patterns = Patterns(include=r"attn", exclude={"gradients": r"\\.wq$"})
    >>> patterns.wants(Kind.GRADIENT, "blocks.0.attn.wq"), patterns.wants(Kind.WEIGHT, "attn.wq")
    (False, True)
    """

    def __init__(self, include: Wanted = None, exclude: Wanted = None) -> None:
        self._include = by_kind("include", include)
        self._exclude = by_kind("exclude", exclude)
        self._known: dict[tuple[Kind, str], bool] = {}

    def wants(self, kind: Kind, name: str) -> bool:
        """Whether the name is wanted: included, or nothing said of its kind, and not excluded."""
        found = self._known.get((kind, name))
        if found is None:
            include, exclude = self._include.get(kind), self._exclude.get(kind)
            found = (include is None or include.search(name) is not None) and (
                exclude is None or exclude.search(name) is None
            )
            self._known[kind, name] = found
        return found


def by_kind(argument: str, wanted: Wanted) -> dict[Kind, re.Pattern[str]]:
    """The pattern of each kind; one pattern is for all of them."""
    if wanted is None:
        return {}
    if not isinstance(wanted, Mapping):
        return dict.fromkeys(Kind, compiled(argument, wanted))
    return {kind_of(argument, kind): compiled(argument, text) for kind, text in wanted.items()}


def compiled(argument: str, text: str | re.Pattern[str]) -> re.Pattern[str]:
    """A pattern; ValueError, with the argument it came from, if it is none."""
    try:
        return re.compile(text)
    except (re.error, TypeError) as error:
        raise ValueError(f"{argument}={text!r} is no regular expression: {error}") from None


def kind_of(argument: str, name: str) -> Kind:
    """The kind that a user calls `name`."""
    try:
        return _WORDS.get(name) or Kind(name)
    except ValueError:
        known = ", ".join(sorted(_WORDS))
        raise ValueError(f"{argument}: no kind is called {name!r}; there are {known}") from None
