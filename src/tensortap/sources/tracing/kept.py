"""What was traced, as it was: copies, what tells whether they have changed, and lists of them."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from xxhash import xxh3_128_digest

from tensortap.buffers import view_of
from tensortap.errors import CaptureError, TensortapError
from tensortap.frameworks.adapters import adapter_of
from tensortap.frameworks.protocol import type_name
from tensortap.frameworks.scalars import safe_repr
from tensortap.frameworks.snapshot import borrow
from tensortap.record import Blob, Fields, Items, Mapping, Opaque, TensorData, Value
from tensortap.sources.tracing.paths import nearest
from tensortap.stats.digest import digest

_BEYOND = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType, FrameType)
_MOST = 100_000  # objects that are looked at for tensors


@dataclass
class Part:
    """Values of one path, each with the iteration and the rank that it is from.

    `orders` is which binding of the name within its call each of them was. Of values that were
    stacked it is a list of each.
    """

    values: list[Any] = field(default_factory=list)
    iterations: list[Any] = field(default_factory=list)
    ranks: list[Any] = field(default_factory=list)
    orders: list[Any] = field(default_factory=list)

    def extend(self, other: Part) -> None:
        """Add the values of another one."""
        self.values += other.values
        self.iterations += other.iterations
        self.ranks += other.ranks
        self.orders += other.orders

    def follow(self, values: list[Any], iterations: list[Any]) -> None:
        """Adapt the orders to lists that a callback has changed.

        One that no order is known of has -1. Lists that do not belong together are an error.
        """
        if len(self.values) == 1 and self.iterations == [iterations]:  # they were stacked
            self.orders[:] = [list(self.orders)]
        elif len(self.values) != len(values):
            left = zip(values, self.orders, strict=False)
            self.orders[:] = [
                next((order for one, order in left if one is value), -1) for value in self.values
            ]
        counts = len(self.values), len(self.iterations), len(self.ranks)
        if len(set(counts)) > 1:
            raise TensortapError(
                "it has left {} values, {} iterations and {} ranks: all three lists are to be "
                "changed alike".format(*counts)
            )


@dataclass
class Turns(Part):
    """Values that wait to be gathered, each with the turn that it is from."""

    turns: list[int] = field(default_factory=list)

    def whole(self) -> Part:
        """Return all values as users get them; small tensors are stored as bytes until then."""
        self.values[:] = [whole(one) for one in self.values]
        return self

    def before(self, boundary: int | None) -> Part:
        """Remove and return the values of turns before `boundary` (None: all)."""
        self.whole()
        taken = [boundary is None or turn < boundary for turn in self.turns]
        found = Part()
        for name in ("values", "iterations", "ranks", "orders", "turns"):
            mine = getattr(self, name)
            getattr(found, name, []).extend(itertools.compress(mine, taken))
            mine[:] = itertools.compress(mine, [not one for one in taken])
        return found


class Results(dict[str, Part]):
    """Path → what was kept of it."""

    def __missing__(self, path: str) -> Part:
        raise KeyError(f"nothing was traced as {path!r}; {nearest(path, self)}")


def keyed_copy(value: Any) -> tuple[Hashable, Any] | None:
    """Return the `fingerprint` of a plain tensor and a copy of it; None for any other value.

    The copy may be compact: see `whole`.
    """
    take = _keyed_copies.get(type(value))
    return None if take is None else take(value)


_keyed_copies: dict[type, Callable[[Any], tuple[Hashable, Any] | None]] = {}
_compact: set[type] = set()


def whole(kept: Any) -> Any:
    """Return a kept value as users see it."""
    return kept.tensor() if type(kept) in _compact else kept


def copied(value: Any) -> Any:
    """Return a copy that shares nothing with the value; tensors in it belong to no graph.

    >>> one = {"a": [1, 2]}
    >>> copied(one) == one, copied(one)["a"] is one["a"]
    (True, False)
    """
    copy_of = _copies.get(type(value)) or _learn(type(value))
    return copy_of(value)


def _learn(cls: type) -> Callable[[Any], Any]:
    """Return how values of a class are copied, and cache it."""
    adapter = adapter_of(cls)
    if adapter.keyed_copy is not None:
        _keyed_copies[cls] = adapter.keyed_copy
    if adapter.compact is not None:
        _compact.add(adapter.compact)
    copy_of = adapter.copy or _copied_deeply
    if len(_copies) < 4096:  # a program that keeps making classes must not fill the memory
        _copies[cls] = copy_of
    return copy_of


def _itself(value: Any) -> Any:
    return value


_copies: dict[type, Callable[[Any], Any]] = dict.fromkeys(
    (int, float, complex, bool, str, bytes, type(None)), _itself
)


def _copied_deeply(value: Any) -> Any:
    if isinstance(value, (ModuleType, FrameType)):
        return Opaque(type_name(type(value)), safe_repr(value))
    if isinstance(value, _BEYOND):
        return value  # through its globals a function holds the whole program
    memo: dict[int, Any] = {}
    for one in _inside(value):
        # deepcopy raises for a tensor that is no leaf of its graph
        copy_of = adapter_of(type(one)).copy
        if copy_of is not None:
            memo[id(one)] = copy_of(one)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a file, a socket: keep what is known of it
        return Opaque(type_name(type(value)), safe_repr(value))


def _inside(value: Any) -> Iterable[Any]:
    """Return all objects inside a value."""
    seen = {id(value)}
    found = [value]
    for one in found:
        if len(found) > _MOST:
            break
        for part in gc.get_referents(one):
            if id(part) not in seen and not isinstance(part, _BEYOND):
                seen.add(id(part))
                found.append(part)
    return found


def fingerprint(value: Any) -> Hashable:
    """Equal for equal content of the same type; None where content cannot be told.

    >>> fingerprint(1) == fingerprint(1), fingerprint(1) == fingerprint(1.0)
    (True, False)
    """
    kind = type(value)
    try:
        adapter = adapter_of(kind)
        node = borrow(value if adapter.local_shard is None else adapter.local_shard(value)[0])
    except CaptureError:
        node = Opaque("", "")
    if type(node) is TensorData:  # nearly always: one call for all of its bytes
        return kind, node.dtype, node.shape, xxh3_128_digest(view_of(node.data))
    if not has_opaque(node):
        return kind, digest(node)
    try:  # the repr of an object does not tell what is in it
        return kind, digest(Blob("bytes", pickle.dumps(value)))
    except Exception:  # somebody else's object: what cannot be told has changed
        return None


def has_opaque(node: Value) -> bool:
    """Return whether a value holds an object of which only type and repr are known."""
    if isinstance(node, Opaque):
        return True
    if isinstance(node, Items):
        return any(has_opaque(part) for part in node.items)
    if isinstance(node, Mapping):
        return any(has_opaque(key) or has_opaque(part) for key, part in node.items)
    if isinstance(node, Fields):
        return any(has_opaque(part) for part in node.values)
    return False
