"""The options of `track`, and names selected by regular expressions, by kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from tensortap.core import rooms
from tensortap.core.arguments import check_callable, check_count
from tensortap.core.patterns import compile_pattern
from tensortap.core.record import Kind
from tensortap.rooms.track.budget import parse_budget

NamePattern: TypeAlias = str | re.Pattern[str] | Mapping[str, str | re.Pattern[str]] | None
Stash = Callable[[Any], Mapping[str, Any]]

KindChoice: TypeAlias = "Kind | str | Sequence[Kind | str] | None"

_TRACKED = (
    Kind.ACTIVATION, Kind.GRADIENT, Kind.WEIGHT, Kind.WEIGHT_GRADIENT, Kind.OPTIMISER_STATE,
)  # fmt: skip
_KINDS = {kind.value.lower(): kind for kind in (*_TRACKED, Kind.HEALTH)}
_KINDS["optimizer_state"] = Kind.OPTIMISER_STATE
INPUT = "input"
_OPTION = "track.option."  # how names of extension points begin by which rooms add options


_NEW = {  # words of track-and-visualize
    **dict.fromkeys(("module", "model_state"), "pass the model first"),
    "optimizer_state": "pass it second",
    **dict.fromkeys(("track_gradients", "track_weights"), "use kind=['activation', 'weight', …]"),
    "stash_value": "use stash",
    "only_stash_during_training": "use only_training",
    **dict.fromkeys(("out_path", "offload_inc", "offload_type", "async_offload"), "use to=folder"),
    "use_wandb": "call run.to_wandb(folder) later",
}


def options_of_rooms() -> set[str]:
    """Return the options that other rooms add to `track`, such as ``analyses``."""
    points = [point for room in rooms.rooms().values() for point in room.offers]
    return {point.removeprefix(_OPTION) for point in points if point.startswith(_OPTION)}


class TrackOptions(NamedTuple):
    """The options of `track`."""

    include: NamePattern = None
    exclude: NamePattern = None
    kind: KindChoice = None
    every: int = 1
    budget: str | float | None = None
    tensors: bool | str | re.Pattern[str] = False
    stash: Stash | None = None
    digests: bool = False
    alerts: Any = False
    on_alert: Any = None
    name: str | None = None
    to: str | Path | None = None
    only_training: bool = True
    init_step: int | None = None
    of_rooms: Mapping[str, Any] = {}

    def check(self) -> None:
        """Raise an error that names the first option with a wrong value."""
        check_count("every", self.every, 0)
        parse_budget(self.budget)
        name: Any = self.name
        if name is not None and not (isinstance(name, str) and name):
            raise TypeError(f"name must be a text that is not empty, got {name!r:.80}")
        if self.init_step is not None:
            check_count("init_step", self.init_step, 0)
        if self.stash is not None:
            check_callable("stash", self.stash)
        if self.on_alert is not None and not self.has_rules:
            raise ValueError("on_alert needs alerts=True, or a list of rules")
        for each in self._chosen:
            if each not in ("all", INPUT):
                kind_named("kind", each)
        if unknown := ", ".join(sorted(set(self.of_rooms) - options_of_rooms())):
            new = [f"instead of {word}, {_NEW[word]}" for word in self.of_rooms if word in _NEW]
            known = ", ".join(sorted({*self._fields[:-1], *options_of_rooms()}))
            new = new or [f"its options are {known}"]
            raise TypeError(f"track has no option {unknown}; {'; '.join(new)}")

    def made_by_rooms(self) -> list[tuple[Callable[..., Any], Any]]:
        """Return the functions that rooms offer for their options, and what the user chose."""
        chosen = self.of_rooms.items()
        return [(rooms.offer(_OPTION + name), value) for name, value in chosen if value]

    @property
    def has_rules(self) -> bool:
        """Return whether rules look at the records and steps."""
        return self.alerts is not False and self.alerts is not None

    @property
    def _chosen(self) -> tuple[str, ...]:
        if self.kind is None:
            return _TRACKED
        return (self.kind,) if isinstance(self.kind, str) else tuple(self.kind)

    @property
    def inputs(self) -> bool:
        """Return whether to record the inputs of modules, too."""
        return not {"all", INPUT}.isdisjoint(self._chosen)

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of records to capture; inputs of modules are activations, too."""
        found = {Kind.HEALTH} if any(self.of_rooms.values()) else set()
        for each in self._chosen:
            if each == "all":
                found.update(_TRACKED)
            else:
                found.add(Kind.ACTIVATION if each == INPUT else kind_named("kind", each))
        return frozenset(found)


class Patterns:
    """Selects names of some kinds by `include` and `exclude`, and caches the answers.

    >>> patterns = Patterns(include=r"attn", exclude={"gradient": r"\\.wq$"})
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
        self._include = _bykind_named("include", include)
        self._exclude = _bykind_named("exclude", exclude)
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


def _bykind_named(argument: str, pattern: NamePattern) -> dict[Kind, re.Pattern[str]]:
    if pattern is None:
        return {}
    if not isinstance(pattern, Mapping):
        return dict.fromkeys(Kind, compile_pattern(pattern, argument))
    return {
        kind_named(argument, kind): compile_pattern(one, argument) for kind, one in pattern.items()
    }


def kind_named(argument: str, name: object) -> Kind:
    """Return a kind that is tracked, by its name."""
    found = _KINDS.get(str(name).lower().removesuffix("s"))
    if found is None:
        known = ", ".join(sorted(_KINDS))
        raise ValueError(f"{argument}: unknown kind {name!r}; the kinds are {known}")
    return found
