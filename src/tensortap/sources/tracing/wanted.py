"""What is wanted of one function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Wanted:
    """The names to see, whether to see what is returned, whether to be told of the end of a call.

    `inner` is the same for functions that are defined inside it.
    """

    names: frozenset[str] = frozenset()
    returns: bool = False
    leaves: bool = False
    inner: Mapping[str, Wanted] = field(default_factory=dict)


def union(all_wanted: Iterable[Wanted]) -> Wanted:
    """What several want together.

    >>> sorted(union([Wanted(frozenset({"x"})), Wanted(frozenset({"y"}), True)]).names)
    ['x', 'y']
    """
    every = list(all_wanted)
    inner: dict[str, list[Wanted]] = {}
    for one in every:
        for name, part in one.inner.items():
            inner.setdefault(name, []).append(part)
    return Wanted(
        frozenset().union(*[one.names for one in every]),
        any(one.returns for one in every),
        any(one.leaves for one in every),
        {name: union(group) for name, group in inner.items()},
    )
