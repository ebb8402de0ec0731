"""Walk nested values: the one traversal of the tree that a record holds.

`tensortap.core.record` defines the nodes. Keys of a dict count as its parts in `map_leaves` and
`tensors`, because they can hold tensors, too; `parts` and `leaves` use them to spell paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tensortap.core.errors import TensortapError
from tensortap.core.record import Fields, Items, Mapping, TensorData, Value

DEPTH = 100
"""Largest number of containers around a leaf."""

CONTAINERS = (Items, Mapping, Fields)


def parts(value: Value, key: Callable[[Value], str] = repr) -> list[tuple[str, Value]]:
    """Return the direct parts of a container, each with its place; nothing for a leaf.

    `key` spells the keys of a dict.

    >>> parts(Mapping((("a", 1), ("b", 2))))
    [("['a']", 1), ("['b']", 2)]
    """
    if isinstance(value, Items):
        return [(f"[{i}]", item) for i, item in enumerate(value.items)]
    if isinstance(value, Mapping):
        return [(f"[{key(name)}]", item) for name, item in value.items]
    if isinstance(value, Fields):
        return [(f".{name}", item) for name, item in zip(value.names, value.values, strict=True)]
    return []


def leaves(
    value: Value, path: str = "", key: Callable[[Value], str] = repr
) -> Iterator[tuple[str, Value]]:
    """Yield every leaf with its path, in order; `key` spells the keys of a dict.

    >>> list(leaves(Items("list", (1, Mapping((("x", 2.5),))))))
    [('[0]', 1), ("[1]['x']", 2.5)]
    """
    if isinstance(value, CONTAINERS):
        for step, part in parts(value, key):
            yield from leaves(part, path + step, key)
    else:
        yield path, value


def children(value: Value) -> Sequence[Value]:
    """Return all direct children of a container, the keys of a dict included."""
    if isinstance(value, Items):
        return value.items
    if isinstance(value, Mapping):
        return [child for pair in value.items for child in pair]
    return value.values if isinstance(value, Fields) else ()


def tensors(value: Value) -> list[TensorData]:
    """Return the tensors in a value in the order in which `map_leaves` visits them."""
    found: list[TensorData] = []

    def collect(leaf: Value) -> Value:
        if isinstance(leaf, TensorData):
            found.append(leaf)
        return leaf

    map_leaves(collect, value)
    return found


def map_leaves(function: Callable[[Value], Value], value: Value, depth: int = 0) -> Value:
    """Return the value with `function` applied to each of its leaves."""
    if not isinstance(value, CONTAINERS):
        return function(value)
    if depth >= DEPTH:
        raise TensortapError(f"value is nested deeper than {DEPTH} containers")
    depth += 1
    if isinstance(value, Items):
        items = tuple([map_leaves(function, item, depth) for item in value.items])
        return Items(value.kind, items)
    if isinstance(value, Mapping):
        pairs = [
            (map_leaves(function, key, depth), map_leaves(function, item, depth))
            for key, item in value.items
        ]
        return Mapping(tuple(pairs))
    values = tuple([map_leaves(function, item, depth) for item in value.values])
    return Fields(value.kind, value.type, value.names, values)
