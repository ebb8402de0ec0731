"""The noise floor: how far two runs of the same code are apart, and whether a third is further."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tensortap.compare.result import Comparison

if TYPE_CHECKING:
    from tensortap.compare.runs import Item, Outcome

MARGIN = 2.0
"""So many times the noise is still noise: two runs show only some of it."""


class Noise:
    """The largest differences of each name and kind, up to each step.

    Noise grows as training goes on: a step is judged by what was seen until then.
    """

    def __init__(self, found: Iterable[tuple[Item, Outcome]], margin: float = MARGIN) -> None:
        self._margin = margin
        self._floors: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
        for item, outcome in found:
            comparison = outcome.comparison
            held = self._floors.setdefault((item.key.name, item.key.kind), [])
            _, size, share = held[-1] if held else (0, 0.0, 0.0)
            rel = comparison.rel_l2 if comparison.rel_l2 is not None else comparison.max_rel
            held.append((item.key.step, max(size, comparison.max_abs), max(share, rel)))

    def covers(self, key: Any, comparison: Comparison) -> bool:
        """Whether a difference is no larger than what two runs of the same code show."""
        if comparison.nonfinite or not comparison.count:
            return False
        floor = None
        for step, size, share in self._floors.get((key.name, key.kind), ()):
            if step <= key.step:
                floor = size, share
        if floor is None:
            return False
        rel = comparison.rel_l2 if comparison.rel_l2 is not None else comparison.max_rel
        return comparison.max_abs <= self._margin * floor[0] and rel <= self._margin * floor[1]
