"""Arrow columns from Python values and back, without pandas.

pyarrow imports pandas, a quarter of a second, as soon as it is handed a plain Python value or
asked for a NumPy array. Neither the training process nor somebody who opens a run has asked for
that: here columns are made of buffers, and read from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa


def column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Values as a column of Arrow; None is null.

    >>> import pyarrow as pa
    >>> column([[1, 2], None, []], pa.list_(pa.int64())).to_pylist()
    [[1, 2], None, []]
    """
    import pyarrow as pa
    from pyarrow import types

    count = len(values)
    nulls = values.count(None)
    if nulls == count:
        return pa.nulls(count, kind)
    valid = _bits([value is not None for value in values]) if nulls else None
    if types.is_map(kind):
        values = [None if value is None else list(value) for value in values]
    if types.is_string(kind) or types.is_binary(kind):
        return _texts(values, kind, valid, nulls, types.is_string(kind))
    if types.is_list(kind) or types.is_map(kind):
        items = list(chain.from_iterable(filter(None, values)))
        ends = _ends(values, nulls)
        within = _pairs(items, kind) if types.is_map(kind) else column(items, kind.value_type)
        return pa.Array.from_buffers(kind, count, [valid, ends], nulls, children=[within])
    if types.is_struct(kind):
        fields = [column([v[f.name] if v else None for v in values], f.type) for f in kind]
        return pa.Array.from_buffers(kind, count, [valid], nulls, children=fields)
    if types.is_boolean(kind):
        return pa.Array.from_buffers(kind, count, [valid, _bits(values)], nulls)
    if nulls:
        values = [0 if value is None else value for value in values]
    numbers = np.array(values, kind.to_pandas_dtype())
    return pa.Array.from_buffers(kind, count, [valid, pa.py_buffer(numbers)], nulls)


def _bits(values: Iterable[Any]) -> pa.Buffer:
    import pyarrow as pa

    return pa.py_buffer(np.packbits(np.array(values, np.bool_), bitorder="little"))


def _ends(values: Sequence[Any], nulls: int) -> pa.Buffer:
    import pyarrow as pa

    ends = np.zeros(len(values) + 1, np.int32)
    lengths = map(len, (value or () for value in values) if nulls else values)
    np.cumsum(np.fromiter(lengths, np.int32, len(values)), out=ends[1:])
    return pa.py_buffer(ends)


def _texts(
    values: Sequence[Any], kind: pa.DataType, valid: pa.Buffer | None, nulls: int, text: bool
) -> pa.Array:
    import pyarrow as pa

    first = values[0]
    if not nulls and values.count(first) == len(values):
        # a name, a dtype, a kind: often one for a whole batch
        raw = first.encode() if text else first
        ends = np.arange(len(values) + 1, dtype=np.int32) * np.int32(len(raw))
        data = [None, pa.py_buffer(ends), pa.py_buffer(raw * len(values))]
        return pa.Array.from_buffers(kind, len(values), data, 0)
    parts = [v and v.encode() for v in values] if text else values
    joined = pa.py_buffer(b"".join(filter(None, parts)))
    return pa.Array.from_buffers(kind, len(values), [valid, _ends(parts, nulls), joined], nulls)


def _pairs(items: list[tuple[Any, Any]], kind: pa.MapType) -> pa.Array:
    import pyarrow as pa

    keys, values = zip(*items, strict=True) if items else ((), ())
    fields = [kind.key_field, kind.item_field]
    children = [column(keys, kind.key_type), column(values, kind.item_type)]
    return pa.Array.from_buffers(pa.struct(fields), len(items), [None], 0, children=children)


def scalar(value: Any, kind: pa.DataType) -> pa.Scalar:
    """A value to compare a column with."""
    return column([value], kind)[0]


def row_indices(rows: np.ndarray[Any, np.dtype[np.int64]]) -> pa.Array:
    """Return indices of rows as Arrow wants them for `take`."""
    import pyarrow as pa

    buffer = pa.py_buffer(np.ascontiguousarray(rows, np.int64))
    return pa.Array.from_buffers(pa.int64(), len(rows), [None, buffer])


def numbers(found: pa.ChunkedArray | pa.Array) -> np.ndarray[Any, np.dtype[Any]]:
    """A column of numbers as an array; where it may be empty, as float64 with NaN for null.

    >>> import pyarrow as pa
    >>> numbers(pa.chunked_array([column([1, None, 3], pa.int64())]))
    array([ 1., nan,  3.])
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if found.null_count:
        found = pc.fill_null(found.cast(pa.float64()), scalar(float("nan"), pa.float64()))
    chunks = found.chunks if isinstance(found, pa.ChunkedArray) else [found]
    parts = [np.from_dlpack(chunk) for chunk in chunks if len(chunk)]
    if not parts:
        return np.empty(0, found.type.to_pandas_dtype())
    return np.concatenate(parts)


def coded(found: pa.ChunkedArray) -> tuple[np.ndarray[Any, np.dtype[np.int32]], list[str]]:
    """A column of words as numbers, and the words; null is the empty word.

    >>> import pyarrow as pa
    >>> coded(pa.chunked_array([column(["b", "a", "b"], pa.string())]))
    (array([0, 1, 0], dtype=int32), ['b', 'a'])
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    words: dict[str, int] = {}
    parts = []
    for chunk in found.chunks:
        if not len(chunk):
            continue
        if not pa.types.is_dictionary(chunk.type):
            chunk = chunk.dictionary_encode()
        called = [words.setdefault(word or "", len(words)) for word in chunk.dictionary.to_pylist()]
        places = chunk.indices
        if places.null_count:
            called.append(words.setdefault("", len(words)))
            places = pc.fill_null(places, scalar(len(called) - 1, places.type))
        parts.append(np.array(called, np.int32)[np.from_dlpack(places)])
    return (np.concatenate(parts) if parts else np.empty(0, np.int32)), list(words)


def lists(
    found: pa.ChunkedArray,
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]]]:
    """A column of lists of whole numbers: how long each is, and all their numbers.

    >>> import pyarrow as pa
    >>> lists(pa.chunked_array([column([[1, 2], None, [3]], pa.list_(pa.int64()))]))
    (array([2, 0, 1]), array([1, 2, 3]))
    """
    import pyarrow.compute as pc

    lengths, values = [], []
    for chunk in found.chunks:
        size = pc.fill_null(
            pc.list_value_length(chunk), scalar(0, pc.list_value_length(chunk).type)
        )
        lengths.append(np.from_dlpack(size).astype(np.int64))
        values.append(np.from_dlpack(chunk.flatten()))
    empty = np.empty(0, np.int64)
    return np.concatenate([empty, *lengths]), np.concatenate([empty, *values])
