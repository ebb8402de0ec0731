"""The families of analyses, by the name that `track` takes."""

from __future__ import annotations

from collections.abc import Sequence

from tensortap.sources.analyses.analysis import Analysis
from tensortap.sources.analyses.norms import Norms

FAMILIES: dict[str, type[Analysis]] = {"norms": Norms}


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
