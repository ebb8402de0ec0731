"""The families of analyses, by the name that `track` takes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from tensortap.rooms.health.analyses.analysis import Analysis

Chosen: TypeAlias = bool | Sequence[str]
"""All families or none, or their names."""

FAMILIES: dict[str, str | type[Analysis]] = {
    "norms": "norms.Norms",
    "updates": "updates.Updates",
    "noise": "noise.GradientNoise",
    "activations": "activations.Activations",
    "attention": "attention.AttentionHeads",
    "experts": "experts.Experts",
}
"""Module and class of each family: they are imported only if somebody wants them."""


def chosen_families(analyses: Chosen | None) -> tuple[str, ...]:
    """Return the families that the option `analyses` means.

    >>> chosen_families(["updates", "norms"])
    ('norms', 'updates')
    """
    if isinstance(analyses, Mapping):
        raise TypeError("analyses must be True, or a list of families, which have no options")
    chosen = FAMILIES if analyses is True else analyses or ()
    for name in chosen:
        if name not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise ValueError(f"analyses has no {name!r:.80}; choose from {known}, or pass True")
    return tuple(name for name in FAMILIES if name in chosen)


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
