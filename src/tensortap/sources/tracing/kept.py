"""What was traced, as it was: copies, what tells whether they have changed, and lists of them."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import sys
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
        """A callback, which knows nothing of orders, has changed these lists: now the orders.

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
        """All of them, as they are for users: small tensors wait as their bytes."""
        self.values[:] = [whole(one) for one in self.values]
        return self

    def before(self, boundary: int | None) -> Part:
        """Those of earlier turns than `boundary` (None: all), which it has no more then."""
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


def marked_copy(value: Any) -> tuple[Hashable, Any] | None:
    """The `fingerprint` of a plain tensor and a copy, in one go; of a small one it is its bytes.

    None for any other value.
    """
    take = _takes.get(type(value))
    return None if take is None else take(value)


_takes: dict[type, Callable[[Any], tuple[Hashable, Any] | None]] = {}
_smalls: set[type] = set()


def whole(kept: Any) -> Any:
    """What was kept, as it is for users."""
    return kept.tensor() if type(kept) in _smalls else kept


def copied(value: Any) -> Any:
    """A copy that shares nothing with the value; tensors in it belong to no graph.

    >>> one = {"a": [1, 2]}
    >>> copied(one) == one, copied(one)["a"] is one["a"]
    (True, False)
    """
    copy_of = _copies.get(type(value)) or _learn(value)
    return copy_of(value)


def _learn(value: Any) -> Callable[[Any], Any]:
    """How values of a class are copied: found out once a class."""
    cls = type(value)
    torch, jax = _loaded("torch", "Tensor"), _loaded("jax", "Array")
    found: Callable[[Any], Any] = _copied_deeply
    if torch is not None and issubclass(cls, torch.Tensor):
        from tensortap.frameworks.torch import copies as torch_copies

        found = torch_copies.copied_tensor
        _takes[torch.Tensor] = torch_copies.marked_copy
        _smalls.add(torch_copies.Small)
    elif jax is not None and isinstance(value, jax.Array):
        found = _copied_jax
    if len(_copies) < 4096:  # a program that makes classes without end must not fill memory
        _copies[cls] = found
    return found


def _itself(value: Any) -> Any:
    return value


_copies: dict[type, Callable[[Any], Any]] = dict.fromkeys(
    (int, float, complex, bool, str, bytes, type(None)), _itself
)


def _copied_deeply(value: Any) -> Any:
    if isinstance(value, _BEYOND):
        return _as_it_is(value)
    torch, jax = _loaded("torch", "Tensor"), _loaded("jax", "Array")
    classes = tuple([one for one in (torch and torch.Tensor, jax and jax.Array) if one])
    memo: dict[int, Any] = {}
    for one in _inside(value) if classes else ():
        # a tensor that is no leaf of its graph refuses to be copied deeply
        if isinstance(one, classes):
            memo[id(one)] = copied(one)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a file, a socket: what is known of it is kept
        return Opaque(type_name(type(value)), safe_repr(value))


def _as_it_is(value: Any) -> Any:
    """Functions and classes are not copied: through their global names they hold the program."""
    if isinstance(value, (ModuleType, FrameType)):
        return Opaque(type_name(type(value)), safe_repr(value))
    return value


def _loaded(name: str, attribute: str) -> Any:
    module = sys.modules.get(name)
    return module if hasattr(module, attribute) else None


def _copied_jax(value: Any) -> Any:
    import jax

    if isinstance(value, jax.core.Tracer):
        raise CaptureError(
            "JAX only traces this function here, its values are not there yet: trace the function "
            "that calls the compiled one, or use tap.catch(...) inside"
        )
    return jax.numpy.array(value, copy=True)  # a donated one is deleted


def _inside(value: Any) -> Iterable[Any]:
    """All objects that a value holds."""
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
    """Whether there is an object in a value of which only type and repr are known."""
    if isinstance(node, Opaque):
        return True
    if isinstance(node, Items):
        return any(has_opaque(part) for part in node.items)
    if isinstance(node, Mapping):
        return any(has_opaque(key) or has_opaque(part) for key, part in node.items)
    if isinstance(node, Fields):
        return any(has_opaque(part) for part in node.values)
    return False
