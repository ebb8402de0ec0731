"""Names selected by regular expressions, by kind."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TypeAlias

from tensortap.patterns import compile_pattern
from tensortap.record import Kind

NamePattern: TypeAlias = str | re.Pattern[str] | Mapping[str, str | re.Pattern[str]] | None

_KINDS = {
    "activations": Kind.ACTIVATION,
    "gradients": Kind.GRADIENT,
    "weights": Kind.WEIGHT,
    "weight_gradients": Kind.WEIGHT_GRADIENT,
    "optimizer_state": Kind.OPTIMISER_STATE,
    "optimiser_state": Kind.OPTIMISER_STATE,
}


class Patterns:
    """Selects names of some kinds by `include` and `exclude`, and caches the answers.

    >>> patterns = Patterns(include=r"attn", exclude={"gradients": r"\\.wq$"})
    >>> patterns.wants(Kind.GRADIENT, "blocks.0.attn.wq"), patterns.wants(Kind.WEIGHT, "attn.wq")
    (False, True)
    """

    def __init__(
        self,
        include: NamePattern = None,
        exclude: NamePattern = None,
        kinds: Collection[Kind] = frozenset(Kind),
    ) -> None:
        self.kinds = kinds
        self._include = _by_kind("include", include)
        self._exclude = _by_kind("exclude", exclude)
        self._cache: dict[tuple[Kind, str], bool] = {}

    def wants(self, kind: Kind, name: str) -> bool:
        """Return whether a name is selected: included, if that is restricted, and not excluded."""
        wanted = self._cache.get((kind, name))
        if wanted is None:
            include, exclude = self._include.get(kind), self._exclude.get(kind)
            wanted = (
                kind in self.kinds
                and (include is None or include.search(name) is not None)
                and (exclude is None or exclude.search(name) is None)
            )
            self._cache[kind, name] = wanted
        return wanted


def _by_kind(argument: str, pattern: NamePattern) -> dict[Kind, re.Pattern[str]]:
    if pattern is None:
        return {}
    if not isinstance(pattern, Mapping):
        return dict.fromkeys(Kind, compile_pattern(pattern, argument))
    return {_kind(argument, kind): compile_pattern(one, argument) for kind, one in pattern.items()}


def _kind(argument: str, name: str) -> Kind:
    try:
        return _KINDS.get(name) or Kind(name)
    except ValueError:
        known = ", ".join(sorted(_KINDS))
        raise ValueError(f"{argument}: unknown kind {name!r}; the kinds are {known}") from None
