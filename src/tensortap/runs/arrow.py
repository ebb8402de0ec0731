"""Arrow columns from Python values and back, without pandas.

pyarrow imports pandas, which takes a quarter of a second, as soon as it converts Python values or
returns a NumPy array. These functions build columns from buffers, and read their buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.core.limits import format_size

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


def column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return values as an Arrow column; None is null.

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
        ends = _offsets(values, nulls)
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


def _offsets(values: Sequence[Any], nulls: int) -> pa.Buffer:
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
        # the names, kinds or dtypes of a whole batch are often the same
        raw = first.encode() if text else first
        ends = np.arange(len(values) + 1, dtype=np.int32) * np.int32(len(raw))
        data = [None, pa.py_buffer(ends), pa.py_buffer(raw * len(values))]
        return pa.Array.from_buffers(kind, len(values), data, 0)
    parts = [v and v.encode() for v in values] if text else values
    joined = pa.py_buffer(b"".join(filter(None, parts)))
    return pa.Array.from_buffers(kind, len(values), [valid, _offsets(parts, nulls), joined], nulls)


def _pairs(items: list[tuple[Any, Any]], kind: pa.MapType) -> pa.Array:
    import pyarrow as pa

    keys, values = zip(*items, strict=True) if items else ((), ())
    fields = [kind.key_field, kind.item_field]
    children = [column(keys, kind.key_type), column(values, kind.item_type)]
    return pa.Array.from_buffers(pa.struct(fields), len(items), [None], 0, children=children)


def scalar(value: Any, kind: pa.DataType) -> pa.Scalar:
    """Return an Arrow scalar, to compare a column with."""
    return column([value], kind)[0]


def row_indices(rows: np.ndarray[Any, np.dtype[np.int64]]) -> pa.Array:
    """Return indices of rows as Arrow wants them for `take`."""
    import pyarrow as pa

    buffer = pa.py_buffer(np.ascontiguousarray(rows, np.int64))
    return pa.Array.from_buffers(pa.int64(), len(rows), [None, buffer])


def take_rows(table: pa.Table, rows: np.ndarray[Any, np.dtype[np.int64]]) -> pa.Table:
    """Return the given rows of a table; adjacent ones are not copied.

    pyarrow takes five times as long as NumPy for exponent counts, the largest column of a run.
    """
    import pyarrow as pa

    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (rows[1:] > rows[:-1]).all():
        return table.slice(int(rows[0]), len(rows))
    names = table.column_names
    bins = table.column("bins") if "bins" in names else None
    if bins is None or bins.null_count == len(bins):
        return table.take(row_indices(rows))
    lengths, items = lists(bins)
    ends = np.concatenate([[0], np.cumsum(lengths[rows])])
    if ends[-1] > np.iinfo(np.int32).max:
        return table.take(row_indices(rows))
    at = np.arange(ends[-1])
    at += np.repeat((np.cumsum(lengths) - lengths)[rows] - ends[:-1], lengths[rows])
    valid = np.concatenate([valid_cells(chunk) for chunk in bins.chunks])[rows]
    buffers = [None if valid.all() else _bits(valid), pa.py_buffer(ends.astype(np.int32))]
    counts = pa.Array.from_buffers(
        bins.type, len(rows), buffers, children=[number_array(items[at])]
    )
    others = table.drop_columns(["bins"]).take(row_indices(rows))
    index = names.index("bins")
    return others.add_column(index, table.field(index), counts)


def number_array(
    values: np.ndarray[Any, np.dtype[Any]], valid: np.ndarray[Any, np.dtype[np.bool_]] | None = None
) -> pa.Array:
    """Return an array as an Arrow column; cells that are not `valid` are null.

    >>> number_array(np.array([1.0, 2.0]), np.array([True, False])).to_pylist()
    [1.0, None]
    """
    import pyarrow as pa

    buffer = pa.py_buffer(np.ascontiguousarray(values))
    bits = None if valid is None else _bits(valid)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [bits, buffer])


def dictionary_array(codes: np.ndarray[Any, np.dtype[np.int32]], texts: list[str]) -> pa.Array:
    """Return codes of texts as an Arrow column.

    >>> dictionary_array(np.array([1, 0], np.int32), ["a", "b"]).to_pylist()
    ['b', 'a']
    """
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(number_array(codes), column(texts, pa.string()))


def numbers(values: pa.ChunkedArray | pa.Array) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a column of numbers as an array; if it has nulls, as float64 with NaN for them.

    >>> import pyarrow as pa
    >>> numbers(pa.chunked_array([column([1, None, 3], pa.int64())]))
    array([ 1., nan,  3.])
    """
    import pyarrow as pa

    chunks = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
    if len(chunks) > 8:  # Arrow joins small chunks faster than a loop visits them
        chunks = [values.combine_chunks()]
    if values.null_count:
        return np.concatenate([_with_nan(chunk) for chunk in chunks])
    empty = np.empty(0, values.type.to_pandas_dtype())
    return np.concatenate([empty, *(np.from_dlpack(chunk) for chunk in chunks if len(chunk))])


def _with_nan(chunk: pa.Array) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return numbers from the buffers of an array: its functions take longer than small arrays."""
    found = valid_cells(chunk)
    if not found.any():
        return np.full(len(chunk), np.nan)
    data = np.frombuffer(chunk.buffers()[1], chunk.type.to_pandas_dtype())
    cells = data[chunk.offset : chunk.offset + len(chunk)].astype(np.float64)
    cells[~found] = np.nan
    return cells


def valid_cells(chunk: pa.Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which cells of an array are not null.

    >>> import pyarrow as pa
    >>> valid_cells(column([1, None, 3], pa.int64())[1:])
    array([False,  True])
    """
    bits = chunk.buffers()[0] if chunk.null_count else None
    if bits is None:
        return np.full(len(chunk), not chunk.null_count)
    end = chunk.offset + len(chunk)
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=end, bitorder="little")[
        chunk.offset :
    ].view(np.bool_)


def coded(strings: pa.ChunkedArray) -> tuple[np.ndarray[Any, np.dtype[np.int32]], list[str]]:
    """Return a column of strings as codes, and the strings; null is the empty string.

    >>> import pyarrow as pa
    >>> coded(pa.chunked_array([column(["b", "a", "b"], pa.string())]))
    (array([0, 1, 0], dtype=int32), ['b', 'a'])
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    words: dict[str, int] = {}
    parts = [np.empty(0, np.int32)]
    for chunk in strings.chunks:
        if not pa.types.is_dictionary(chunk.type):
            chunk = chunk.dictionary_encode()
        codes = [words.setdefault(word or "", len(words)) for word in chunk.dictionary.to_pylist()]
        indices = chunk.indices
        if indices.null_count:
            codes.append(words.setdefault("", len(words)))
            indices = pc.fill_null(indices, scalar(len(codes) - 1, indices.type))
        if len(chunk):
            parts.append(np.array(codes, np.int32)[np.from_dlpack(indices)])
    return np.concatenate(parts), list(words)


def lists(
    values: pa.ChunkedArray,
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the length of each list in a column of integer lists, and all their integers.

    >>> import pyarrow as pa
    >>> lists(pa.chunked_array([column([[1, 2], None, [3]], pa.list_(pa.int64()))]))
    (array([2, 0, 1]), array([1, 2, 3]))
    """
    import pyarrow.compute as pc

    lengths: list[Any] = [np.empty(0, np.int64)]
    items: list[Any] = [np.empty(0, np.int64)]
    for chunk in values.chunks:
        sizes = pc.list_value_length(chunk)
        sizes = pc.fill_null(sizes, scalar(0, sizes.type))
        lengths.append(np.from_dlpack(sizes).astype(np.int64))
        items.append(np.from_dlpack(chunk.flatten()))
    return np.concatenate(lengths), np.concatenate(items)


def read_groups(
    file: pq.ParquetFile, groups: list[int], columns: list[str] | None, limit: int
) -> pa.Table:
    """Return row groups; raise ValueError if they take more than `limit` bytes of memory.

    Parquet stores a value that repeats once. So no cell is larger than its column in the file, but
    all may be as large: unless they fit, they are read in batches until there are too many bytes.
    """
    import pyarrow as pa

    footer = file.metadata
    leaves = [footer.schema.column(i).path for i in range(footer.num_columns)]
    wanted = [i for i, p in enumerate(leaves) if columns is None or p.partition(".")[0] in columns]
    found = [footer.row_group(group).column(i) for group in groups for i in wanted]
    # other types take 8 bytes per value at most, however often one repeats
    texts = [column for column in found if column.physical_type == "BYTE_ARRAY"]
    largest = max((column.total_uncompressed_size for column in texts), default=1)
    total = sum(column.total_uncompressed_size for column in found)
    bound = 8 * sum(column.num_values for column in found)
    bound += largest * sum(column.num_values for column in texts)
    if bound <= limit:
        return _complete(
            file.read_row_groups(groups, columns, use_threads=len(groups) > 1), footer, groups
        )
    batches: list[pa.RecordBatch] = []
    if total <= limit:
        for batch in file.iter_batches(max(1, limit // (4 * largest)), groups, columns):
            batches.append(batch)
            total += batch.nbytes
            if total > limit:
                break
    if total > limit:
        raise ValueError(f"a small file with more than {format_size(limit)} of rows")
    return _complete(pa.Table.from_batches(batches), footer, groups)


def _complete(table: pa.Table, footer: Any, groups: list[int]) -> pa.Table:
    """Return a table; raise ValueError unless it has as many rows as the footer says."""
    rows = sum(footer.row_group(group).num_rows for group in groups)
    if table.num_rows != rows:
        raise ValueError(f"{table.num_rows} rows, not {rows} as it says")
    return table


def leaf_statistics(footer: Any, group: int, name: str) -> Any:
    """Return the statistics of a column in a row group, as far as it has any that can be read."""
    columns = (footer.row_group(group).column(i) for i in range(footer.num_columns))
    found = next(column for column in columns if column.path_in_schema == name).statistics
    try:
        return found if found is not None and found.has_min_max and found.min is not None else None
    except ValueError:  # a text that is not in UTF-8
        return None
