"""The noise floor: how much two runs of the same code differ."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tensortap.compare.result import Comparison

if TYPE_CHECKING:
    from tensortap.compare.runs import Outcome, RecordPair

MARGIN = 2.0
"""Factor above the measured noise that still counts as noise: two runs show only part of it."""


class Noise:
    """The largest differences per name and kind, up to each step.

    Noise grows during training, so a step is judged by the noise until then.
    """

    def __init__(self, found: Iterable[tuple[RecordPair, Outcome]], margin: float = MARGIN) -> None:
        self._margin = margin
        self._floors: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
        for item, outcome in found:
            comparison = outcome.comparison
            held = self._floors.setdefault((item.key.name, item.key.kind), [])
            _, size, share = held[-1] if held else (0, 0.0, 0.0)
            rel = comparison.rel_l2 if comparison.rel_l2 is not None else comparison.max_rel
            held.append((item.key.step, max(size, comparison.max_abs), max(share, rel)))

    def covers(self, key: Any, comparison: Comparison) -> bool:
        """Return whether a difference is no larger than the noise."""
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
