"""The records of two runs around one that differs: other tensors, earlier steps, inputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.core.errors import TensortapError
from tensortap.core.record import Kind
from tensortap.rooms.compare.compared_run import RecordPart, whole
from tensortap.rooms.compare.matching import Choice, ChosenRecords
from tensortap.rooms.compare.pairs import Sides
from tensortap.rooms.compare.plan import RecordPair
from tensortap.rooms.compare.tasks import records_of_run
from tensortap.rooms.reasons.explain import explain
from tensortap.runs.assemble import Disagreement
from tensortap.values.view import array_of

_MOST = 200  # tensors of a step that are looked at


def reasons(sides: Sides, item: RecordPair, renames: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return why two records, or tensors assembled from shards, differ."""
    a = b = None
    try:
        if all(part.has_value for part in (*item.a, *item.b)):
            a, b = whole(sides[0], item.a), whole(sides[1], item.b)
    except (Disagreement, TensortapError):
        return ()
    is_whole = len(item.a) == len(item.b) == 1 and item.key.rank >= 0
    around = Around(sides, item, tuple(renames)) if is_whole else None
    atol, rtol, *_ = item.tolerance
    return explain(a, b, atol=atol, rtol=rtol, around=around)


class Around:
    """Finds records of the same rank near a pair that differs; shards have none."""

    def __init__(
        self, sides: Sides, item: RecordPair, renames: tuple[tuple[str, str], ...]
    ) -> None:
        self.item = item
        self._sides = sides
        self._renames = renames

    def _records(self, side: int, kind: str, steps: Any, name: str | None = None) -> ChosenRecords:
        names = None if name is None else f"^{re.escape(name)}$"
        choice = Choice(names, (kind,), steps, (self._own(side).record.rank,), self._renames)
        return records_of_run(self._sides[side], choice, rename=side == 0)

    def _own(self, side: int) -> RecordPart:
        return (self.item.a, self.item.b)[side][0]

    def _array(self, side: int, part: RecordPart | None) -> NDArray[Any] | None:
        if part is None or not part.has_value:
            return None
        try:
            return array_of(self._sides[side].value(part))
        except TensortapError:
            return None

    def _is_same(self, one: int, part: RecordPart, other: int, another: RecordPart) -> bool:
        """Return whether two tensors have the same bits, as far as the runs tell."""
        x, y = part.record, another.record
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            return False
        if x.digest and y.digest and len(x.digest) == len(y.digest):
            return x.digest == y.digest
        if x.stats is not None and y.stats is not None:
            if repr(x.stats) != repr(y.stats) or not (part.has_value and another.has_value):
                return repr(x.stats) == repr(y.stats)
        a, b = self._array(one, part), self._array(other, another)
        return a is not None and b is not None and a.tobytes() == b.tobytes()

    def _is_constant(self, side: int) -> bool:
        stats, found = self._own(side).record.stats, self._array(side, self._own(side))
        if stats is not None:
            return not stats.std > 0
        return found is None or not found.size or bool((found == found.flat[0]).all())

    def equal_to(self, side: int) -> str:
        """Return the name of another tensor of the other run that equals the one of this run.

        In this run, that one is different: otherwise they are equal by their meaning.
        """
        if self._is_constant(side):  # all of them are alike
            return ""
        here = self._equal_names(side, side)
        return next((name for name in self._equal_names(side, 1 - side) if name not in here), "")

    def _equal_names(self, side: int, other: int) -> list[str]:
        """Return the tensors of one run in this step that equal the tensor of a run."""
        step, kind = self.item.key.step, self.item.key.kind
        records = self._records(other, kind, (step, step))
        table, rows = records.table, records.rows
        rows = rows[table.call[rows] == self.item.key.call][:_MOST]
        return [
            key.name
            for key, part in zip(records.keys(rows), records.parts(rows), strict=True)
            if key.name != self.item.key.name and self._is_same(side, self._own(side), other, part)
        ]

    def _before(self, side: int) -> tuple[int, RecordPart] | None:
        """Return the last step before, and the record of the same name there."""
        key = self.item.key
        records = self._records(side, key.kind, (None, key.step - 1), key.name)
        table, rows = records.table, records.rows
        rows = rows[table.call[rows] == key.call]
        if not len(rows):
            return None
        last = rows[[np.argmax(table.step[rows])]]
        return int(table.step[last[0]]), records.parts(last)[0]

    def unchanged_since(self, side: int) -> int | None:
        """Return the step before if the tensor was the same there."""
        before = self._before(side)
        if before is None or not self._is_same(side, self._own(side), side, before[1]):
            return None
        return before[0]

    def has_changed(self, side: int) -> bool:
        """Return whether the tensor was another one in the step before."""
        before = self._before(side)
        return before is not None and not self._is_same(side, self._own(side), side, before[1])

    def inputs(self) -> Iterator[NDArray[Any]]:
        """Yield what the module may have computed its output from: the last outputs before it."""
        step, own = self.item.key.step, self._own(1).record
        records = self._records(1, Kind.ACTIVATION.value, (step, step))
        table, rows = records.table, records.rows
        rows = rows[table.seq[rows] < own.seq]
        rows = rows[np.argsort(table.seq[rows])][-3:][::-1]
        for part in records.parts(rows):
            found = self._array(1, part)
            if found is not None and found.shape == own.shape:
                yield found

    def parameter(self, name: str, default: float) -> NDArray[Any]:
        """Return a parameter of the module before this step, or the default."""
        key = self.item.key
        name = f"{key.name}.{name}"
        records = self._records(1, Kind.WEIGHT.value, (None, key.step - 1), name)
        if len(records.rows):
            last = records.rows[[np.argmax(records.table.step[records.rows])]]
            found = self._array(1, records.parts(last)[0])
            if found is not None:
                return found.astype(np.float64)
        return np.array(default)
