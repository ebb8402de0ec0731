"""An operation as the reasons see it, and the words that they share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Operands(NamedTuple):
    """An operation as the reasons see it: inputs and outputs as float64, None if not known."""

    name: str
    node: str
    dtype: str
    arrays: dict[str, Array | None]
    outputs: list[Array]
    scalars: dict[str, Any]

    @property
    def first(self) -> Array | None:
        """The first tensor that the operation read."""
        return next(iter(self.arrays.values()), None)

    @property
    def second(self) -> Array | None:
        """The second operand: a tensor, or a number."""
        found = list(self.arrays.values())
        if len(found) > 1:
            return found[1]
        number = self.scalars.get("other", self.scalars.get("exponent"))
        return np.array(float(number)) if isinstance(number, (int, float)) else None

    @property
    def largest(self) -> float:
        """The largest finite number of the output's dtype."""
        return _largest(self.dtype)


Reason = Callable[[Operands], str | None]
REASONS: dict[str, list[Reason]] = {}


def reason_for(*names: str) -> Callable[[Reason], Reason]:
    def add(reason: Reason) -> Reason:
        for name in names:
            REASONS.setdefault(name, []).append(reason)
        return reason

    return add


def _largest(dtype: str) -> float:
    import ml_dtypes

    from tensortap.core.dtypes import numpy_dtype

    try:
        return float(ml_dtypes.finfo(numpy_dtype(dtype)).max)
    except (TypeError, ValueError, KeyError):
        return math.inf


# -- words ------------------------------------------------------------------------------------


def elements(count: Any, of: str = "") -> str:
    """Return a number of elements as the subject of a sentence, with its verb."""
    owner = f" of {of}" if of else ""
    return (
        f"{int(count):,} element{owner} is" if count == 1 else f"{int(count):,} elements{owner} are"
    )


def negatives(count: Any, what: str) -> str:
    return f"1 {what} number" if count == 1 else f"{int(count):,} {what} numbers"


def rows(bad: Any) -> str:
    """Return the bad rows of a tensor in words, given which of them are bad."""
    places = [tuple(map(int, place)) for place in np.argwhere(bad)]
    shown = [str(place[0]) if len(place) == 1 else str(list(place)) for place in places[:3]]
    if not shown or not places[0]:
        return "the row is"
    more = f" and {len(places) - 3:,} more" if len(places) > 3 else ""
    return f"row {shown[0]} is" if len(places) == 1 else f"rows {', '.join(shown)}{more} are"


def limit(operands: Operands) -> str:
    return f"the largest {operands.dtype}, {operands.largest:,.6g}"


def bad_elements(outputs: list[Array]) -> Any:
    return ~np.isfinite(outputs[0]) if outputs else np.zeros(())


def peak(array: Array | None) -> float:
    if array is None:
        return math.nan
    finite = array[np.isfinite(array)]
    return float(np.abs(finite).max()) if finite.size else math.nan


def value_range(array: Array) -> str:
    finite = array[np.isfinite(array)]
    if not finite.size:
        return "no finite value"
    return f"{finite.min():.4g} to {finite.max():.4g}"


def kinds(array: Array) -> str:
    nans, infs = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    parts = [f"{n:,} {word}" for n, word in ((nans, "NaN"), (infs, "Inf")) if n]
    return " and ".join(parts)
