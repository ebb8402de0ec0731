"""Read both values of a difference on demand."""

from __future__ import annotations

from collections.abc import Mapping as Places
from typing import Any, NamedTuple

from tensortap.compare.compared_run import ComparedRun, RecordPart, whole
from tensortap.compare.report import Key
from tensortap.frameworks.rebuild import rebuild
from tensortap.record import Blob, Fields, Items, Mapping, Number, TensorData


class ValueReader(NamedTuple):
    """Reads the two values of a record at every call and keeps nothing.

    Shards that do not form a whole raise `Disagreement`.
    """

    sides: tuple[ComparedRun, ComparedRun]
    places: Places[Key, tuple[list[RecordPart], list[RecordPart]]]

    def __call__(self, key: Key) -> tuple[Any, Any]:
        """Return both values as they are stored: nodes, arrays over mapped bytes, or objects."""
        a, b = self.places[key]
        return whole(self.sides[0], a), whole(self.sides[1], b)

    def values(self, key: Key) -> tuple[Any, Any]:
        """Return both values as the objects that were captured."""
        a, b = self(key)
        return _own(a), _own(b)


def _own(value: Any) -> Any:
    neutral = isinstance(value, (TensorData, Number, Blob, Fields, Items, Mapping))
    return rebuild(value) if neutral else value
