"""Results of a tracer: lists of values with their iterations, ranks and orders."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from tensortap.errors import TensortapError
from tensortap.sources.tracing.copies import expanded
from tensortap.sources.tracing.paths import nearest


@dataclass
class TracedValues:
    """Values of one path, each with its iteration, its rank and its order.

    The order counts the bindings of a name within one call. For values that a callback has
    stacked, each entry is a list.
    """

    values: list[Any] = field(default_factory=list)
    iterations: list[Any] = field(default_factory=list)
    ranks: list[Any] = field(default_factory=list)
    orders: list[Any] = field(default_factory=list)

    def extend(self, other: TracedValues) -> None:
        """Append other values."""
        self.values += other.values
        self.iterations += other.iterations
        self.ranks += other.ranks
        self.orders += other.orders

    def align_orders(self, values: list[Any], iterations: list[Any]) -> None:
        """Adapt the orders to a callback that has changed the other lists, given their old state.

        A value that the callback has added gets order -1. Raises if the lists differ in length.
        """
        if len(self.values) == 1 and self.iterations == [iterations]:  # they were stacked
            self.orders[:] = [list(self.orders)]
        elif len(self.values) != len(values):
            remaining = zip(values, self.orders, strict=False)
            self.orders[:] = [
                next((order for one, order in remaining if one is value), -1)
                for value in self.values
            ]
        lengths = len(self.values), len(self.iterations), len(self.ranks)
        if len(set(lengths)) > 1:
            raise TensortapError(
                "it has left {} values, {} iterations and {} ranks; it must change all three "
                "lists alike".format(*lengths)
            )


@dataclass
class PendingValues(TracedValues):
    """Values that wait to be gathered, each with the call of the model that it belongs to."""

    calls: list[int] = field(default_factory=list)

    def expanded(self) -> TracedValues:
        """Return all values as users see them; small tensors wait in a compact form."""
        self.values[:] = [expanded(one) for one in self.values]
        return self

    def take_before(self, boundary: int | None) -> TracedValues:
        """Remove and return the values of calls before `boundary` (None: all values)."""
        self.expanded()
        taken = [boundary is None or call < boundary for call in self.calls]
        result = TracedValues()
        for name in ("values", "iterations", "ranks", "orders", "calls"):
            column = getattr(self, name)
            getattr(result, name, []).extend(itertools.compress(column, taken))
            column[:] = itertools.compress(column, [not one for one in taken])
        return result


class TraceResults(dict[str, TracedValues]):
    """Traced values by path."""

    def __missing__(self, path: str) -> TracedValues:
        raise KeyError(f"nothing was traced as {path!r}; {nearest(path, self)}")
