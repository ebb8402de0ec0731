"""The families of analyses, by the name that `track` takes."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from tensortap.sources.analyses.analysis import Analysis

FAMILIES: dict[str, str | type[Analysis]] = {
    "norms": "norms.Norms",
    "updates": "updates.Updates",
    "noise": "noise.GradientNoise",
}
"""Module and class of each family: they are imported only if somebody wants them."""


def chosen_families(analyses: bool | Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the families that the option `analyses` means.

    >>> chosen_families(["norms"]), chosen_families(False)
    (('norms',), ())
    """
    if analyses is None or isinstance(analyses, bool):
        return tuple(FAMILIES) if analyses else ()
    known = ", ".join(FAMILIES)
    for name in analyses:
        if name not in FAMILIES:
            raise ValueError(f"analyses has no {name!r:.80}; choose from {known}, or pass True")
    return tuple(name for name in FAMILIES if name in analyses)


def family(name: str) -> type[Analysis]:
    """Return the class of a family.

    >>> family("norms").__name__
    'Norms'
    """
    found = FAMILIES[name]
    if isinstance(found, str):
        module, _, cls = found.rpartition(".")
        found = getattr(importlib.import_module(f"tensortap.sources.analyses.{module}"), cls)
    return found
