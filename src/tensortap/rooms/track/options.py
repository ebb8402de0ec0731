"""The options of `track`, and names selected by regular expressions, by kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from tensortap.core.arguments import check_callable, check_count
from tensortap.core.patterns import compile_pattern
from tensortap.core.record import Kind
from tensortap.rooms.health.analyses import Chosen, chosen_families
from tensortap.stats.blocks import check_format

NamePattern: TypeAlias = str | re.Pattern[str] | Mapping[str, str | re.Pattern[str]] | None
Stash = Callable[[Any], Mapping[str, Any]]

_KINDS = {
    "activations": Kind.ACTIVATION,
    "gradients": Kind.GRADIENT,
    "weights": Kind.WEIGHT,
    "weight_gradients": Kind.WEIGHT_GRADIENT,
    "optimizer_state": Kind.OPTIMISER_STATE,
    "optimiser_state": Kind.OPTIMISER_STATE,
    "health": Kind.HEALTH,
}


class TrackOptions(NamedTuple):
    """The options of `track`."""

    include: NamePattern = None
    exclude: NamePattern = None
    activations: bool = True
    gradients: bool = True
    weights: bool = True
    optimizer_state: bool = True
    every: int = 1
    stats: bool = True
    tensors: bool | str | re.Pattern[str] = False
    stash: Stash | None = None
    only_training: bool = True
    init_step: int | None = None
    alerts: Any = False
    on_alert: Any = None
    name: str | None = None
    out_path: str | Path | None = None
    digests: bool = False
    ops: bool = False
    inputs: bool = False
    formats: Sequence[str] = ()
    analyses: Chosen = False

    def check(self) -> None:
        """Raise an error that names the first option with a wrong value."""
        check_count("every", self.every)
        name: Any = self.name
        if name is not None and not (isinstance(name, str) and name):
            raise TypeError(f"name must be a text that is not empty, got {name!r:.80}")
        if self.init_step is not None:
            check_count("init_step", self.init_step, 0)
        if self.stash is not None:
            check_callable("stash", self.stash)
        for each in self.formats:
            check_format(each)
        chosen_families(self.analyses)
        if self.on_alert is not None and not self.has_rules:
            raise ValueError("on_alert needs alerts=True, or a list of rules")

    @property
    def has_rules(self) -> bool:
        """Return whether rules look at the records and steps."""
        return self.alerts is not False and self.alerts is not None

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of records that are switched on."""
        switches = {
            Kind.ACTIVATION: self.activations,
            Kind.GRADIENT: self.gradients,
            Kind.WEIGHT: self.weights,
            Kind.WEIGHT_GRADIENT: self.weights and self.gradients,
            Kind.OPTIMISER_STATE: self.optimizer_state,
            Kind.HEALTH: bool(self.analyses),
        }
        return frozenset(kind for kind, on in switches.items() if on)


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
