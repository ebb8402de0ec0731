"""What a value becomes in HDF5, and what it was.

HDF5 has integers, float16 to float64, complex numbers and texts. A dtype that it has not is stored
as unsigned integers of its size, bit for bit, with its true name in the attribute
``tensortap_dtype``: bfloat16 as uint16, float8 as uint8, times as int64.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from tensortap.dtypes import DTYPES, itemsize, numpy_dtype
from tensortap.errors import CaptureError, TensortapError
from tensortap.frameworks.rebuild import rebuild
from tensortap.frameworks.snapshot import borrow
from tensortap.frameworks.view import as_numpy
from tensortap.hdf5.rows import Array
from tensortap.record import Fields, Items, Mapping, Number, TensorData, Value

_NATIVE = frozenset(row.name for row in DTYPES.values() if row.numpy == row.name)
_SWAPPED = re.compile(r">[iufc]\d+")
_INTEGERS = frozenset(name for name in _NATIVE if DTYPES[name].kind in ("int", "uint"))
_PYTHON: dict[type, str] = {bool: "bool", int: "int64", float: "float64"}


class Item:
    """One value, ready to be stored: an array of a stored dtype, or a text."""

    __slots__ = ("array", "dtype", "framework", "text")

    def __init__(self, dtype: str, framework: str, array: Array | None, text: str = "") -> None:
        self.dtype = dtype
        self.framework = framework
        self.array = array
        self.text = text


def item_of(value: Any, float_dtype: str | None = None, int_dtype: str | None = None) -> Item:
    """The value as it will be stored; its memory is borrowed where that can be.

    >>> item = item_of(2.5)
    >>> item.dtype, item.framework, item.array
    ('float64', 'python', array(2.5))
    """
    node = value if isinstance(value, (TensorData, Number)) else borrow(value)
    if isinstance(node, str):
        if "\0" in node:
            raise TensortapError("a text with a NUL in it is none that HDF5 can hold")
        return Item("str", "python", None, node)
    name, framework, array = _array(node, value)
    wanted = int_dtype if name in _INTEGERS else float_dtype if _is_float(name) else None
    if wanted is not None and wanted != name:
        array = _converted(array, name, wanted)
        name = wanted
    return Item(name, framework, array.view(stored_as(name)))


def can_hold(leaf: Any) -> bool:
    """Whether there is a place in HDF5 for a leaf of a record.

    >>> can_hold("a"), can_hold("\\0"), can_hold(Number("int", "1" + "0" * 30))
    (True, False, False)
    """
    if isinstance(leaf, str):
        return "\0" not in leaf
    if isinstance(leaf, Number):
        return leaf.kind == "complex"
    return isinstance(leaf, (TensorData, *_PYTHON))


def leaves_of(value: Any) -> list[tuple[str, Any]]:
    """The tensors, numbers and texts in a container, each with its place; none if it holds others.

    >>> leaves_of({"a": [1, 2.5]}), leaves_of([None]), leaves_of(3)
    ([('[a][0]', 1), ('[a][1]', 2.5)], [], [])
    """
    if not isinstance(value, (dict, list, tuple)) and not dataclasses.is_dataclass(value):
        return []
    try:
        found = list(_leaves(borrow(value), ""))
    except CaptureError:
        return []
    return found if all(can_hold(leaf) for _, leaf in found) else []


def _leaves(node: Value, place: str) -> Iterator[tuple[str, Any]]:
    parts: list[tuple[str, Value]]
    if isinstance(node, Items):
        parts = [(f"[{i}]", item) for i, item in enumerate(node.items)]
    elif isinstance(node, Mapping):
        parts = [(f"[{key}]", item) for key, item in node.items]
    elif isinstance(node, Fields):
        parts = [(f".{n}", item) for n, item in zip(node.names, node.values, strict=True)]
    else:
        yield place, node
        return
    for step, part in parts:
        yield from _leaves(part, place + step)


def _array(node: Value, value: Any) -> tuple[str, str, Array]:
    if isinstance(node, TensorData):
        return node.dtype, node.framework, as_numpy(node)
    if isinstance(node, Number) and node.kind == "complex":
        return "complex128", "python", np.array(complex(*node.parts), np.complex128)
    name = _PYTHON.get(type(node))
    if name is not None:
        return name, "python", np.array(node, name)
    if isinstance(node, Number):
        raise TensortapError("an integer of more than 64 bits is none that HDF5 can hold")
    raise TensortapError(
        f"HDF5 holds tensors, numbers and texts, not a {type(value).__name__}: trace its parts, "
        f"or make it one of these in a callback before"
    )


@functools.lru_cache(maxsize=256)
def _is_float(name: str) -> bool:
    # packed ones, and those that this ml_dtypes has not, are only bits to NumPy
    row = DTYPES.get(name)
    return row is not None and row.kind == "float" and numpy_dtype(name).name == name


def check_dtype(given: Any, what: str) -> str:
    """The name of a dtype for floats or integers; `what` says of which option it is.

    >>> check_dtype("float16", "float_dtype"), check_dtype(np.float32, "float_dtype")
    ('float16', 'float32')
    """
    name = given if isinstance(given, str) else _dtype_name(given)
    if what == "float_dtype":
        known = _is_float(name)
    else:
        known = name in _INTEGERS and (what == "int_dtype" or name.startswith("int"))
    if not known:
        example = "'float16', 'float32' or 'bfloat16'" if what == "float_dtype" else "'int32'"
        raise TensortapError(f"{what}={given!r}: say the name of a dtype, as {example}")
    return name


def _dtype_name(given: Any) -> str:
    """The name of a dtype of NumPy or torch."""
    if type(given).__module__.partition(".")[0] == "torch":
        return str(given).removeprefix("torch.")
    try:
        return str(np.dtype(given).name)
    except TypeError:
        return ""


def _converted(array: Array, name: str, wanted: str) -> Array:
    target = numpy_dtype(wanted)
    if name in _INTEGERS:
        limits = np.iinfo(target)
        if array.size and not (limits.min <= int(array.min()) and int(array.max()) <= limits.max):
            raise TensortapError(
                f"int_dtype={wanted!r} has no room for {int(array.min())} to {int(array.max())}"
            )
    with np.errstate(all="ignore"):  # the user chose it: what is too large becomes infinite
        return array.astype(target)


def stored_as(name: str) -> np.dtype[Any]:
    """The dtype in the file for a dtype of tensors.

    >>> stored_as("float32"), stored_as("bfloat16"), stored_as("float8_e4m3fn")
    (dtype('float32'), dtype('uint16'), dtype('uint8'))
    """
    if name in _NATIVE or _SWAPPED.fullmatch(name):
        return np.dtype(name)
    size = itemsize(name)
    if size == 8:  # times
        return np.dtype(np.int64)
    return np.dtype(f"u{size}" if size in (1, 2, 4) else f"V{size}")


def value_of(array: Array, dtype: str, framework: str) -> Any:
    """The value that was stored, as what it was."""
    array = np.asarray(array, order="C")
    if framework == "python":
        return array.view(numpy_dtype(dtype)).item()
    return rebuild(TensorData(framework, dtype, array.shape, array.tobytes()))


def integers(item: Any, dtype: str) -> Array:
    """An iteration or a rank, or lists of them in one another, padded with -1.

    >>> integers([[0, 1], [2]], "int64").tolist()
    [[0, 1], [2, -1]]
    """
    if type(item) is int:
        return _padded(item, (), dtype)
    shape: list[int] = []
    depths: set[int] = set()
    _measure(item, 0, shape, depths)
    if len(depths) > 1:
        raise TensortapError("iterations and ranks must lie equally deep in their lists")
    return _padded(item, tuple(shape), dtype)


def _padded(item: Any, shape: tuple[int, ...], dtype: str) -> Array:
    found = np.full(shape, -1, dtype)
    try:
        _fill(found, item)
    except OverflowError:
        raise TensortapError(f"iteration_dtype={dtype!r} has no room for {item}") from None
    return found


def _measure(item: Any, level: int, shape: list[int], depths: set[int]) -> None:
    if not isinstance(item, (list, tuple)):
        depths.add(level)
        return
    if level == len(shape):
        shape.append(0)
    shape[level] = max(shape[level], len(item))
    for part in item:
        _measure(part, level + 1, shape, depths)


def _fill(found: Array, item: Any) -> None:
    if not isinstance(item, (list, tuple)):
        found[...] = item
        return
    for i, part in enumerate(item):
        _fill(found[i, ...], part)


def lists(array: Array) -> Any:
    """What `integers` was made of.

    >>> lists(integers([[0, 1], [2]], "int64"))
    [[0, 1], [2]]
    """
    if array.ndim == 0:
        return int(array)
    used = [part for part in array if (part != -1).any()]
    return [lists(part) for part in used]
