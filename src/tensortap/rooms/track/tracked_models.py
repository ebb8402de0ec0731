"""The models that are tracked at the same time, whose names are kept apart by a prefix."""

from __future__ import annotations

import itertools
import logging
import weakref
from typing import Protocol

log = logging.getLogger("tensortap")


class TrackedModel(Protocol):
    """An observer of a model, with the prefix of its names."""

    prefix: str
    active: bool


_models: weakref.WeakSet[TrackedModel] = weakref.WeakSet()


def is_tracking() -> bool:
    """Return whether any model is tracked now."""
    return any(model.active for model in _models)


def register(model: TrackedModel, name: str | None) -> None:
    """Set the prefix of a model: the name that the user chose, or one that is free."""
    taken = {other.prefix for other in _models if other.active}
    if name is not None:
        model.prefix = f"{name}."
        if model.prefix in taken:
            raise ValueError(f"name {name!r} is already used by another tracker")
    elif "" in taken:
        model.prefix = next(p for n in itertools.count(2) if (p := f"model{n}.") not in taken)
        log.warning(
            "tensortap: another model is tracked already, so the names of this one begin with "
            "%r; tap.track(model, name=...) chooses a name", model.prefix,
        )  # fmt: skip
    _models.add(model)
