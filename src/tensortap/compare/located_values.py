"""Both values of what differs, when somebody wants to see them."""

from __future__ import annotations

from collections.abc import Mapping as Places
from typing import Any, NamedTuple

from tensortap.compare.report import Key
from tensortap.compare.sides import Part, Side, whole
from tensortap.frameworks.rebuild import rebuild
from tensortap.record import Blob, Fields, Items, Mapping, Number, TensorData


class Look(NamedTuple):
    """Where values are: nothing is held of them, they are read at every call.

    Shards that do not make a whole raise `Disagreement`, as they did when they were compared.
    """

    sides: tuple[Side, Side]
    places: Places[Key, tuple[list[Part], list[Part]]]

    def __call__(self, key: Key) -> tuple[Any, Any]:
        """As they are read: neutral trees, arrays over mapped bytes, or objects."""
        a, b = self.places[key]
        return whole(self.sides[0], a), whole(self.sides[1], b)

    def values(self, key: Key) -> tuple[Any, Any]:
        """As what they were when they were captured."""
        a, b = self(key)
        return _own(a), _own(b)


def _own(value: Any) -> Any:
    neutral = isinstance(value, (TensorData, Number, Blob, Fields, Items, Mapping))
    return rebuild(value) if neutral else value
