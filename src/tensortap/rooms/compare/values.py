"""Compare two values of any kind: tensors, numbers, text, and containers of them.

- Tensors of any framework, and numbers: ``|a - b| <= atol + rtol*|b|``. NaN equals NaN (unless
  ``equal_nan=False``), and an infinity equals itself. Different dtypes are noted; different
  shapes are a difference.
- Integers with each other: exactly, unless a tolerance is given. Bools: exactly. An integer with
  a float: by the tolerance, on their exact difference. Integers beyond 64 bits: exactly.
- Text, bytes, None: exactly. A number and text differ.
- Dicts by key, lists and tuples by position (list or tuple is only noted), namedtuples and
  dataclasses by field.
- Types registered with a comparison (`tap.rooms.dump.register_format`): by that comparison.
- All other objects: by ``==`` if their class defines it, else by their attributes.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.core.errors import TensortapError
from tensortap.core.record import Blob, Fields, Items, Mapping, Number, TensorData
from tensortap.core.values import DEPTH
from tensortap.rooms.compare.result import Comparison
from tensortap.rooms.compare.tensors import Tolerance, check_tolerance, compare_tensors
from tensortap.rooms.dump.files import own_comparison
from tensortap.stats.conversion import is_number
from tensortap.values.adapters import safe_repr
from tensortap.values.rebuild import rebuild
from tensortap.values.view import array_of

PARTS = 1000
"""Largest number of differing parts that are kept; all are counted."""


def compare_values(
    a: Any,
    b: Any,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    equal_nan: bool = True,
    threads: int = 0,
) -> Comparison:
    """Compare two values; the result says where and by how much they differ.

    >>> import numpy as np
    >>> bool(compare_values([1.0, "a"], [1.0 + 1e-9, "a"]))
    True
    >>> compare_values({"w": np.ones(3)}, {"w": np.array([1, 1, 2.0])})
    <differ: 1 of 1 values, max|Δ|=1, rel=0.5, 4.5e+15 ulp>
      ["w"]: 1 of 3 elements, max|Δ|=1, rel=0.5, 4.5e+15 ulp, cosine=0.942809,
      worst at [2]: 1 and 2, atol=1 or rtol=0.5 would pass
    """
    check_tolerance(atol, rtol)
    tolerance = Tolerance(equal_nan=bool(equal_nan), threads=threads)
    return compare_with(a, b, tolerance.given(atol, rtol))


def compare_with(a: Any, b: Any, tolerance: Tolerance) -> Comparison:
    """Compare two values with a tolerance that has been checked."""
    return _Walk(tolerance).compare(a, b, "")


class _Walk:
    """Walk two trees side by side."""

    def __init__(self, rules: Tolerance) -> None:
        self.rules = rules
        self.open: set[tuple[int, int]] = set()  # pairs under comparison, to detect cycles

    def compare(self, a: Any, b: Any, path: str) -> Comparison:
        a, b = _plain(a), _plain(b)
        own = own_comparison(a, b)
        if own is not None:
            reason = "differ by the comparison registered for their type"
            return _verdict(bool(own(a, b)), reason, path)
        if _is_scalar(a) and _is_scalar(b):
            return self._numbers(a, b, path)
        arrays = _arrays(a, b)
        if arrays is not None:
            return self._elements(*arrays, path)
        pair = id(a), id(b)
        if pair in self.open:  # a cycle, the same in both so far
            return Comparison(True, path=path, leaves=0)
        if len(self.open) >= DEPTH:
            raise TensortapError(
                f"containers are nested deeper than {DEPTH} at {path[:200]}; compare their parts"
            )
        self.open.add(pair)
        try:
            return self._objects(a, b, path)
        finally:
            self.open.discard(pair)

    def _elements(self, a: NDArray[Any], b: NDArray[Any], path: str) -> Comparison:
        """Compare two arrays; arrays of text, dates or objects as lists."""
        if a.shape == b.shape and not (is_number(a.dtype) and is_number(b.dtype)):
            return _Walk(self.rules).compare(a.tolist(), b.tolist(), path)
        return compare_tensors(a, b, self.rules, path)

    def _numbers(self, a: Any, b: Any, path: str) -> Comparison:
        try:
            return compare_tensors(_number(a), _number(b), self.rules, path)
        except OverflowError:  # integers beyond 64 bits: exactly
            return _verdict(bool(a == b), f"{safe_repr(a, 60)} and {safe_repr(b, 60)}", path)

    def _objects(self, a: Any, b: Any, path: str) -> Comparison:
        if a is None or b is None or isinstance(a, _TEXT) or isinstance(b, _TEXT):
            return _text(a, b, path)
        if isinstance(a, dict) and isinstance(b, dict):
            return self._parts(a, b, path, _key)
        fields = _fields_of(a), _fields_of(b)
        if fields[0] is not None and fields[1] is not None:
            return self._parts(fields[0], fields[1], path, _field, _types(a, b))
        if isinstance(a, _LISTS) and isinstance(b, _LISTS):
            lengths = f": lengths {len(a):,} and {len(b):,}"
            items = dict(enumerate(a)), dict(enumerate(b))
            return self._parts(*items, path, _key, _types(a, b), lengths)
        kinds = (*_LISTS, dict)
        if isinstance(a, kinds) or isinstance(b, kinds) or _is_tensor(a) or _is_tensor(b):
            return _verdict(False, f"a {_name(a)} and a {_name(b)}", path)
        return self._others(a, b, path)

    def _others(self, a: Any, b: Any, path: str) -> Comparison:
        same: Any = type(a).__eq__
        if type(a) is type(b) and same is object.__eq__ and not isinstance(a, _ATOMS):
            attributes = _attributes(a), _attributes(b)
            if attributes[0] or attributes[1]:
                return self._parts(*attributes, path, _field)
        try:
            equal = bool(a is b or a == b)
        except Exception as error:  # user code
            reason = f"a {_name(a)} and a {_name(b)}, whose == raised {type(error).__name__}"
            return _verdict(False, reason, path)
        return _verdict(equal, f"{safe_repr(a, 60)} and {safe_repr(b, 60)}", path)

    def _parts(
        self,
        a: dict[Any, Any],
        b: dict[Any, Any],
        path: str,
        spell: Callable[[Any], str],
        notes: tuple[str, ...] = (),
        lacking: str = "",
    ) -> Comparison:
        """Compare what two containers hold under the same keys."""

        def children() -> Iterator[Comparison]:
            for key in {**a, **b}:
                where = path + spell(key)
                if key in a and key in b:
                    yield self.compare(a[key], b[key], where)
                else:
                    side = "a" if key in a else "b"
                    yield _verdict(False, f"only {side} has it{lacking}", where)

        return gather(children(), path, notes)


_TEXT = (str, bytes, bytearray)
_LISTS = (list, tuple, collections.deque)
_ATOMS = (
    enum.Enum, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType,
    types.MethodType,
)  # fmt: skip
_NO_TENSOR = (str, bytes, bytearray, dict, list, tuple, set, frozenset, type(None), type)


def gather(children: Iterable[Comparison], path: str, notes: tuple[str, ...] = ()) -> Comparison:
    """Combine the comparisons of a container's parts."""
    sums: dict[str, Any] = dict.fromkeys(_SUMS, 0)
    max_abs = max_rel = sum_abs = sum_rel = 0.0
    ulps: int | None = None
    parts: list[Comparison] = []
    all_notes: dict[str, None] = dict.fromkeys(notes)
    for child in children:
        for name in _SUMS:
            sums[name] += getattr(child, name)
        max_abs, max_rel = max(max_abs, child.max_abs), max(max_rel, child.max_rel)
        sum_abs += child.mean_abs * child.finite
        sum_rel += child.mean_rel * child.finite
        if child.ulps is not None:
            ulps = max(ulps or 0, child.ulps)
        if not child:
            parts += child.parts or (child,)
            del parts[PARTS:]
        all_notes.update(dict.fromkeys(child.notes))
    differing, finite = sums["differing"], sums["finite"] or 1
    return Comparison(
        not differing,
        f"{differing:,} of {sums['leaves']:,} values" if differing else "",
        path, tuple(all_notes)[:10], max_abs=max_abs, mean_abs=sum_abs / finite,
        max_rel=max_rel, mean_rel=sum_rel / finite, ulps=ulps, parts=tuple(parts), **sums,
    )  # fmt: skip


_SUMS = ("leaves", "differing", "count", "finite", "mismatches", "nonfinite")


def _verdict(equal: bool, reason: str, path: str) -> Comparison:
    if equal:
        return Comparison(True, path=path)
    return Comparison(False, reason, path, differing=1)


def _plain(value: Any) -> Any:
    """Turn one level of record nodes into the Python objects they stand for."""
    if isinstance(value, Items):
        if value.kind in ("set", "frozenset"):
            return rebuild(value)
        return tuple(value.items) if value.kind == "tuple" else list(value.items)
    if isinstance(value, Mapping):
        try:
            return {rebuild(key): item for key, item in value.items}
        except TypeError as error:
            raise TensortapError(f"a key of a dict cannot be hashed: {error}") from None
    if isinstance(value, (Number, Blob)):
        return rebuild(value)
    return value


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex)) and not isinstance(value, enum.Enum)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, TensorData) or (hasattr(value, "dtype") and hasattr(value, "shape"))


def _number(value: Any) -> NDArray[Any]:
    """Return a number as a 0-d array; raise OverflowError beyond 64 bits."""
    if isinstance(value, int) and not isinstance(value, bool):
        dtype: type[np.generic] = np.int64 if value < 1 << 63 else np.uint64
        return np.array(value, dtype)
    return np.array(value)


def _arrays(a: Any, b: Any) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Return both as arrays if one is a tensor and the other can become an array."""
    if isinstance(a, _NO_TENSOR) and isinstance(b, _NO_TENSOR):
        return None
    first, second = array_of(a), array_of(b)
    if first is None and second is None:
        return None
    first = _as_array(a) if first is None else first
    second = _as_array(b) if second is None else second
    return None if first is None or second is None else (first, second)


def _as_array(value: Any) -> NDArray[Any] | None:
    """Return a number or a list of numbers as an array; None for anything else."""
    if _is_scalar(value):
        try:
            return _number(value)
        except OverflowError:
            return None
    if not isinstance(value, (list, tuple)):
        return None
    try:
        found = np.asarray(value)
    except (ValueError, OverflowError, TypeError, RuntimeError):
        return None
    if found.dtype.kind in "biufc" and not _holds_tensors(value):
        return found
    return None


def _holds_tensors(value: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether a list holds tensors, which are compared one by one with their own dtypes."""
    return any(
        _holds_tensors(each) if isinstance(each, (list, tuple)) else _is_tensor(each)
        for each in value
    )


def _text(a: Any, b: Any, path: str) -> Comparison:
    a, b = (bytes(each) if isinstance(each, bytearray) else each for each in (a, b))
    return _verdict(type(a) is type(b) and a == b, f"{_short(a)} and {_short(b)}", path)


def _short(value: Any) -> str:
    if value is None or isinstance(value, (*_TEXT, bool, int, float, complex)):
        return safe_repr(value, 60)
    return f"a {_name(value)}"


def _fields_of(value: Any) -> dict[str, Any] | None:
    """Return the fields of a namedtuple, a dataclass, or the node of one; None for others."""
    if isinstance(value, Fields):
        return dict(zip(value.names, value.values, strict=False))
    names = getattr(type(value), "_fields", None)
    if isinstance(value, tuple) and isinstance(names, tuple):
        return dict(zip(names, value, strict=False))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in fields if hasattr(value, name)}
    return None


def _attributes(value: Any) -> dict[str, Any]:
    state = object.__getstate__(value)  # what __dict__ and __slots__ hold
    own, slots = state if isinstance(state, tuple) else (state, None)
    return {**(slots or {}), **(own or {})}


def _types(a: Any, b: Any) -> tuple[str, ...]:
    names = _name(a), _name(b)
    return (f"a {names[0]} and a {names[1]}",) if names[0] != names[1] else ()


def _name(value: Any) -> str:
    if isinstance(value, Fields):
        return value.type.rpartition(":")[2].rpartition(".")[2]
    return type(value).__name__


def _field(name: str) -> str:
    return f".{name}"


def _key(key: Any) -> str:
    if isinstance(key, str):
        return '["' + key[:80].replace("\\", "\\\\").replace('"', '\\"') + '"]'
    return f"[{safe_repr(key, 60)}]"
