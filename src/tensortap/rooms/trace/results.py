"""Values that a tracer keeps: their copies, whether they changed, and lists of them."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable, Hashable, Iterable
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
from xxhash import xxh3_128_digest

from tensortap.core.buffers import view_of
from tensortap.core.errors import CaptureError, TensortapError
from tensortap.core.record import Opaque, TensorData, Value
from tensortap.core.values import children
from tensortap.rooms.trace.paths import nearest
from tensortap.stats.digest import digest
from tensortap.values.adapters import adapter_of, safe_repr
from tensortap.values.protocol import SMALL, type_name
from tensortap.values.registry import parts
from tensortap.values.snapshot import borrow

_NOT_COPIED = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType, FrameType)
_ATOMS = frozenset((int, float, complex, bool, str, bytes, type(None)))
KEYED: dict[type, Callable[[Any], tuple[Hashable, Any] | None]] = {}
"""Functions that copy a plain tensor and take its `fingerprint` in one go, by class.

They return None for tensors that need the general way.
"""
COMPACT: set[type] = set()
"""Classes of copies whose ``tensor()`` is the value."""


# -- copies --------------------------------------------------------------------------------


def keyed_copy(value: Any) -> tuple[Hashable, Any] | None:
    """Return the `fingerprint` of a plain tensor and a copy of it; None for any other value.

    The copy may be compact; `expanded` returns the tensor.
    """
    copy_of = KEYED.get(type(value))
    return None if copy_of is None else copy_of(value)


def expanded(kept: Any) -> Any:
    """Return a kept value as users see it."""
    return kept.tensor() if type(kept) in COMPACT else kept


def copied(value: Any) -> Any:
    """Return a copy that shares nothing with the value; tensors in it belong to no graph."""
    if type(value) in _ATOMS:
        return value
    copy_of = adapter_of(type(value)).copy
    return _copied_deeply(value) if copy_of is None else copy_of(value)


def _copied_deeply(value: Any) -> Any:
    if isinstance(value, (ModuleType, FrameType)):
        return Opaque(type_name(type(value)), safe_repr(value))
    if isinstance(value, _NOT_COPIED):
        return value  # through its globals a function holds the whole program
    memo: dict[int, Any] = {}
    for one in _objects_in(value):
        # deepcopy raises for a tensor that is no leaf of its graph
        copy_of = adapter_of(type(one)).copy
        if copy_of is not None:
            memo[id(one)] = copy_of(one)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a file, a socket: keep what is known of it
        return Opaque(type_name(type(value)), safe_repr(value))


def _objects_in(value: Any) -> Iterable[Any]:
    """Return all objects that a value refers to, directly or indirectly."""
    seen = {id(value)}
    objects = [value]
    for one in objects:
        if len(objects) > 100_000:
            break
        for part in gc.get_referents(one):
            if id(part) not in seen and not isinstance(part, _NOT_COPIED):
                seen.add(id(part))
                objects.append(part)
    return objects


def fingerprint(value: Any) -> Hashable:
    """Return a key that is equal for equal content of the same type; None for other objects.

    Their repr may hide their content, so they count as changed.
    """
    kind = type(value)
    try:
        adapter = adapter_of(kind)
        node = borrow(value if adapter.local_shard is None else adapter.local_shard(value)[0])
    except CaptureError:
        node = Opaque("", "")
    if type(node) is TensorData:  # the common case: one call for all bytes
        data = view_of(node.data)
        # the same key as `keyed_copy` makes: one tensor may be compared in both ways
        key = bytes(data) if data.nbytes <= SMALL else xxh3_128_digest(data)
        return kind, node.dtype, node.shape, key
    return None if _has_opaque(node) else (kind, digest(node))


def _has_opaque(value: Value) -> bool:
    """Return whether a value contains an object of which only type and repr are known."""
    return isinstance(value, Opaque) or any(map(_has_opaque, children(value)))


# -- lists of values -----------------------------------------------------------------------


class Iteration(NamedTuple):
    """The number of a call within its mode, its number over both modes, and the mode."""

    number: int
    call: int
    mode: str


_T = TypeVar("_T")


class TracedValues(msgspec.Struct, Generic[_T], array_like=True):
    """Values of one path, each with its iteration and its rank.

    For values that a callback has stacked, each entry is a list.
    """

    values: list[_T] = []
    iterations: list[Any] = []
    ranks: list[Any] = []

    def extend(self, other: TracedValues[_T]) -> None:
        self.values += other.values
        self.iterations += other.iterations
        self.ranks += other.ranks

    def check_lengths(self) -> None:
        """Raise if a callback has left lists of different lengths."""
        lengths = len(self.values), len(self.iterations), len(self.ranks)
        if len(set(lengths)) > 1:
            raise TensortapError(
                "it has left {} values, {} iterations and {} ranks; it must change all three "
                "lists alike".format(*lengths)
            )


class PendingValues(TracedValues[Any], array_like=True):
    """Values that wait to be gathered, each with the call of the model that it belongs to."""

    calls: list[int] = []

    def expanded(self) -> TracedValues[Any]:
        """Return all values as users see them; small tensors wait in a compact form."""
        self.values[:] = [expanded(one) for one in self.values]
        return self

    def take_before(self, boundary: int | None) -> TracedValues[Any]:
        """Remove and return the values of calls before `boundary` (None: all values)."""
        self.expanded()
        taken = [boundary is None or call < boundary for call in self.calls]
        result = TracedValues[Any]()
        for name in ("values", "iterations", "ranks", "calls"):
            column = getattr(self, name)
            getattr(result, name, []).extend(itertools.compress(column, taken))
            column[:] = itertools.compress(column, [not one for one in taken])
        return result


class TraceResults(dict[str, TracedValues[Any]]):
    """Traced values by path."""

    def __missing__(self, path: str) -> TracedValues[Any]:
        raise KeyError(f"nothing was traced as {path!r}; {nearest(path, self)}")


def stack_padded_tensors(
    name: str, values: list[Any], iterations: list[Any], ranks: list[Any]
) -> None:
    """Replace the values by one: stacked along a new first dimension, padded with zeros.

    Numbers become a tensor, too. Text and other values stay as they are. The iterations and ranks
    of the stacked values become one list each, so that ``iterations[0][i]`` belongs to
    ``values[0][i]``.

    >>> import numpy as np
    >>> values, iterations, ranks = [np.ones(2), np.ones(3)], [4, 5], [0, 0]
    >>> stack_padded_tensors("forward.x", values, iterations, ranks)
    >>> values, iterations, ranks
    ([array([[1., 1., 0.],
             [1., 1., 1.]])], [[4, 5]], [[0, 0]])
    """
    if not values:
        return
    stacks = [part.stack for part in parts("tensortap.rooms.trace")]
    found = (each(name, values) for each in (*stacks, _stack))
    stacked = next((each for each in found if each is not None), None)
    if stacked is not None:
        values[:] = [stacked]
        iterations[:] = [list(iterations)]
        ranks[:] = [list(ranks)]


def array_of_numbers(values: list[Any]) -> np.ndarray[Any, Any] | None:
    """Return an array that holds these numbers exactly; None for other values."""
    kinds = {type(value) for value in values}
    if not kinds <= {bool, int, float, complex}:
        return None
    if kinds == {bool}:
        return np.array(values, np.bool_)
    if complex in kinds or float in kinds:
        # floats are exact for integers up to this one
        if all(abs(value) <= 1 << 53 for value in values if isinstance(value, int)):
            return np.array(values, np.complex128 if complex in kinds else np.float64)
    elif all(-(1 << 63) <= value < 1 << 63 for value in values):
        return np.array(values, np.int64)
    return None


def padded_shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the smallest shape that holds all of these; missing dimensions come first."""
    most = max(map(len, shapes))
    whole = [(1,) * (most - len(shape)) + shape for shape in shapes]
    return tuple([max(sizes) for sizes in zip(*whole, strict=True)])


def corner(row: Any, shape: tuple[int, ...]) -> Any:
    """Return the part of a padded tensor that holds a value of this shape."""
    return row[(0,) * (row.ndim - len(shape)) + (*map(slice, shape), ...)]


def no_common_dtype(name: str, dtypes: Iterable[object]) -> TensortapError:
    names = " and ".join(sorted(str(dtype) for dtype in dtypes))
    return TensortapError(
        f"cannot stack {name}: values are {names}; convert them in an earlier callback"
    )


def _stack(name: str, values: list[Any]) -> np.ndarray[Any, Any] | None:
    """Return arrays or numbers stacked along a new first dimension, padded with zeros."""
    if not all(isinstance(value, (np.ndarray, np.generic)) for value in values):
        return array_of_numbers(values)
    arrays = [np.asarray(value) for value in values]
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) > 1:
        raise no_common_dtype(name, dtypes)
    shape = padded_shape([array.shape for array in arrays])
    if all(array.shape == shape for array in arrays):
        return np.stack(arrays)
    stacked = np.zeros((len(arrays), *shape), arrays[0].dtype)
    for row, array in zip(stacked, arrays, strict=True):
        corner(row, array.shape)[...] = array
    return stacked
