"""The families of analyses, by the name that `track` takes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from tensortap.rooms.health.analyses.analysis import Analysis

Chosen: TypeAlias = bool | Sequence[str] | Mapping[str, Mapping[str, Any]]
"""All families or none, their names, or their names with options of their own."""

_NO_OPTIONS: dict[str, Any] = {}

FAMILIES: dict[str, str | type[Analysis]] = {
    "norms": "norms.Norms",
    "updates": "updates.Updates",
    "noise": "noise.GradientNoise",
    "activations": "activations.Activations",
    "attention": "attention.AttentionHeads",
    "experts": "experts.Experts",
}
"""Module and class of each family: they are imported only if somebody wants them."""


def chosen_families(analyses: Chosen | None) -> dict[str, Mapping[str, Any]]:
    """Return the families that the option `analyses` means, each with its own options.

    >>> chosen_families(["norms"]), chosen_families({"experts": {"top_k": 2}})
    ({'norms': {}}, {'experts': {'top_k': 2}})
    """
    if analyses is None or isinstance(analyses, bool):
        return {name: {} for name in FAMILIES} if analyses else {}
    given = analyses if isinstance(analyses, Mapping) else dict.fromkeys(analyses, _NO_OPTIONS)
    for name, options in given.items():
        if name not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise ValueError(f"analyses has no {name!r:.80}; choose from {known}, or pass True")
        for option in options:
            if option not in family(name).options:
                known = ", ".join(family(name).options) or "none"
                raise ValueError(f"analyses: {name!r} has no option {option!r:.80}, but {known}")
    return {name: given[name] for name in FAMILIES if name in given}


def family(name: str) -> type[Analysis]:
    """Return the class of a family.

    >>> family("norms").__name__
    'Norms'
    """
    found = FAMILIES[name]
    if isinstance(found, str):
        module, _, cls = found.rpartition(".")
        found = getattr(importlib.import_module(f"tensortap.rooms.health.analyses.{module}"), cls)
    return found
