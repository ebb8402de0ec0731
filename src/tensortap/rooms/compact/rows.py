"""Write the rows of a window: sorted by kind, name, step, rank, call and seq, and their roll-up.

The rows of a window may not fit into memory. So they are first spread over files of a few tensors
each, which are then sorted and merged one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tensortap.core.files import restrict
from tensortap.runs.arrow import coded, number_array, numbers, take_rows
from tensortap.runs.rows import COLUMNS, STATISTICS, schema, validated
from tensortap.runs.tables import NameCounts, add_counts
from tensortap.runs.windows import RECORDS, ROW_GROUP, WHOLE
from tensortap.table.columns import holds_tensor
from tensortap.table.numbering import codes, first_of
from tensortap.table.shard_keys import contents_of, places_of, same_tensor, unequal_groups
from tensortap.table.sources import ALL_STATISTICS, RowBlock
from tensortap.table.table import Table

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

# columns with few distinct values; dictionaries of others take time and room
_REPEATED = [name for name in COLUMNS if name not in (*STATISTICS[5:], "seq", "time_ns", "number")]
_TOGETHER = 65_536  # rows that are sorted together: larger blocks of memory are not used again
Key = tuple[str, str]  # kind and name
Rank = tuple[int, int, int, int]  # records, first step, last step, time of the last record


class Part(msgspec.Struct, frozen=True):
    """A sealed part: its path in the run, and what is in it."""

    file: str
    rank: int
    names: NameCounts


def write_rows(
    first: int,
    last: int,
    parts: Sequence[Part],
    folder: Path,
    opened: Callable[[str], AbstractContextManager[Path]],
) -> dict[str, Any]:
    """Write the rows of some steps into a folder; return what the manifest tells about them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    buckets = _buckets(parts)
    files = _spread(first, last, parts, folder, opened, buckets)
    sizes = [0, 0]
    ranks: dict[int, Rank] = {}
    with ExitStack() as stack:
        columns = schema().remove_metadata()
        records, whole = (
            stack.enter_context(pq.ParquetWriter(
                folder / name, kind, compression="zstd", use_dictionary=_REPEATED))
            for name, kind in ((RECORDS, columns), (WHOLE, _rolled_schema()))
        )  # fmt: skip
        for name in (RECORDS, WHOLE):
            restrict(folder / name)
        rolled: list[pa.Table] = []
        for file in files:
            rows = _sorted(file)
            file.unlink()
            sizes[0] += rows.num_rows
            if rows.num_rows:  # else its tensors were recorded at other steps
                _note_ranks(rows, ranks)
                for group in _row_groups(rows):
                    records.write_table(group)
                rolled.append(rolled_up(rows))
            count = sum(each.num_rows for each in rolled)
            if rolled and (count > ROW_GROUP or file is files[-1]):
                for group in _row_groups(pa.concat_tables(rolled).combine_chunks()):
                    whole.write_table(group)
                sizes[1] += count
                rolled = []
    return {"rows": sizes[0], "rolled": sizes[1], "ranks": ranks}


def _note_ranks(rows: pa.Table, ranks: dict[int, Rank]) -> None:
    """Count the records of each rank; note its first and last step, and the time of the last."""
    rank, step, time_ns = (numbers(rows.column(each)) for each in ("rank", "step", "time_ns"))
    number = codes(rank)
    each, counts = rank[first_of(number)], np.bincount(number)
    first, last = np.full(len(each), 1 << 62), np.full(len(each), -(1 << 62))
    np.minimum.at(first, number, step)
    np.maximum.at(last, number, step)
    time, newest = np.zeros(len(each), np.int64), np.flatnonzero(step == last[number])
    np.maximum.at(time, number[newest], time_ns[newest])
    for own, *found in zip(*(a.tolist() for a in (each, counts, first, last, time)), strict=True):
        count, low, *end = ranks.get(own, (0, 1 << 62, -(1 << 62), 0))
        high, latest = max(tuple(end), tuple(found[2:]))
        ranks[own] = count + found[0], min(low, found[1]), high, latest


# -- spreading and sorting -------------------------------------------------------------------


def _buckets(parts: Sequence[Part]) -> dict[Key, int]:
    """Return the number of the file of each tensor; together they are in the order of keys."""
    counts = add_counts(part.names for part in parts)
    sizes = {(kind, name): n for name, kinds in counts.items() for kind, n in kinds.items()}
    numbers: dict[Key, int] = {}
    bucket = total = 0
    for key in sorted(sizes):
        if total and total + sizes[key] > _TOGETHER:
            bucket, total = bucket + 1, 0
        numbers[key], total = bucket, total + sizes[key]
    return numbers


def _spread(
    first: int,
    last: int,
    parts: Sequence[Part],
    folder: Path,
    opened: Callable[[str], AbstractContextManager[Path]],
    buckets: dict[Key, int],
) -> list[Path]:
    """Write each row into the file of its tensor."""
    import pyarrow as pa

    files = [folder / f"{number}.arrows" for number in range(max(buckets.values()) + 1)]
    columns = schema().remove_metadata()
    with ExitStack() as stack:
        writers = [stack.enter_context(pa.ipc.new_stream(str(file), columns)) for file in files]
        for part in parts:
            with opened(part.file) as path:
                for rows in _read(path, part.rank, first, last):
                    for bucket, own in _by_bucket(rows, buckets):
                        writers[bucket].write_table(own)
    return files


def _read(path: Path, rank: int, first: int, last: int) -> Iterator[pa.Table]:
    """Yield the rows of some steps; those of dropped records are left out."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(65_536, columns=list(COLUMNS)):
            rows = validated(_table(batch), rank)
            step = rows.column("step")
            inside = pc.and_(pc.greater_equal(step, first), pc.less_equal(step, last))
            kept = pc.and_(inside, pc.invert(rows.column("missing")))
            rows = rows if pc.all(kept).as_py() else rows.filter(kept)
            if rows.num_rows:
                yield rows


def _table(batch: pa.RecordBatch) -> pa.Table:
    import pyarrow as pa

    return pa.Table.from_batches([batch]).replace_schema_metadata(None)


def _by_bucket(rows: pa.Table, buckets: dict[Key, int]) -> Iterator[tuple[int, pa.Table]]:
    bucket = _tensors(rows, buckets)
    if (bucket == bucket[0]).all():
        yield int(bucket[0]), rows
        return
    order = np.argsort(bucket, kind="stable")
    rows = take_rows(rows, order)
    edges = np.flatnonzero(np.diff(bucket[order], prepend=-1))
    for start, end in zip(edges, np.append(edges[1:], len(order)), strict=True):
        yield int(bucket[order[start]]), rows.slice(start, end - start)


def _tensors(rows: pa.Table, numbers_of: dict[Key, int]) -> Integers:
    """Return the number of the kind and the name of each row."""
    (name, names), (kind, kinds) = (coded(rows.column(each)) for each in ("name", "kind"))
    known = [[numbers_of.get((k, n), 0) for n in names] for k in kinds]
    table = np.array(known, np.int64).reshape(len(kinds), len(names))
    return np.asarray(table[kind, name])


def _sorted(file: Path) -> pa.Table:
    import pyarrow as pa

    with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
        rows = stream.read_all()
    names, kinds = (set(rows.column(each).unique().to_pylist()) for each in ("name", "kind"))
    keys = {key: i for i, key in enumerate(sorted((k, n) for k in kinds for n in names))}
    by = [numbers(rows.column(each)) for each in ("seq", "call", "rank", "step")]
    order = np.lexsort([*by, _tensors(rows, keys)])
    return take_rows(rows, order).combine_chunks()


def _row_groups(rows: pa.Table) -> Iterator[pa.Table]:
    """Yield rows in groups; a tensor is in as few of them as possible."""
    tensor = codes(*(coded(rows.column(each))[0] for each in ("kind", "name")))
    edges = np.append(np.flatnonzero(np.diff(tensor, prepend=-1)), len(tensor))
    start = 0
    for end, after in zip(edges[1:], [*edges[2:], len(tensor) + ROW_GROUP], strict=True):
        if after - start > ROW_GROUP:
            for at in range(start, end, ROW_GROUP):
                yield rows.slice(at, min(ROW_GROUP, end - at))
            start = int(end)


# -- the roll-up -----------------------------------------------------------------------------


class _Rows:
    """Rows in memory, as the only block of a table."""

    statistics = ALL_STATISTICS
    bounded = clipped = outdated = is_large = False
    names: Sequence[str] = ()

    def __init__(self, rows: pa.Table) -> None:
        self.blocks: Sequence[RowBlock] = (self,)
        self._rows = rows

    def refresh(self) -> None:
        """Do nothing: there are no new rows."""

    def __len__(self) -> int:
        return int(self._rows.num_rows)

    def read(self, columns: list[str], start: int) -> pa.Table:
        return self._rows.select(columns).slice(start)

    def take(self, rows: Integers, columns: list[str]) -> pa.Table:
        return take_rows(self._rows.select(columns), rows)


def _rolled_schema() -> pa.Schema:
    """Return the columns of a roll-up: those of the run format, and what ranks have of a tensor."""
    import pyarrow as pa

    more = [("records", pa.int32()), ("kept", pa.bool_()), ("differs", pa.bool_()),
            ("far_rank", pa.int32()), ("far", pa.float64())]  # fmt: skip
    return pa.schema([*schema().remove_metadata(), *(pa.field(*each) for each in more)])


def rolled_up(rows: pa.Table) -> pa.Table:
    """Return whole tensors of sorted rows, as rows of the run format.

    ``records`` is the number of records of the tensor, ``kept`` says whether a rank kept its
    elements, ``differs`` whether replicas do,
    ``far_rank`` is the rank whose RMS is farthest from the median of the ranks, and ``far`` its
    distance, relative to the median.
    """
    import pyarrow as pa

    parts = Table(lambda: _Rows(rows))
    whole = parts.whole()
    taken = whole.take(np.arange(len(whole)), list(COLUMNS))
    leader = np.arange(len(parts)) if whole is parts else whole.leaders()
    every = np.arange(len(parts))
    tensor = same_tensor(parts, every)
    differs = np.zeros(int(tensor.max(initial=-1)) + 1, np.bool_)
    far_rank, far = np.full(len(differs), -1, np.int32), np.full(len(differs), np.nan)
    known = np.flatnonzero(parts.column("count") > 0)
    if len(known) and whole is not parts:
        places = places_of(parts, known)
        within = codes(tensor[known], places.batch, places.place)
        content = contents_of(parts, known, within)
        is_unequal = unequal_groups(parts, known, within, content)
        differs[tensor[known[first_of(within)[is_unequal]]]] = True
        known = known[~np.isnan(parts.column("rm2")[known])]
        _note_farthest(parts, known, tensor, far_rank, far)
    has_dtype = np.array([bool(dtype) for dtype in parts.dtypes], np.bool_)[parts.dtype]
    kept = holds_tensor(rows, has_dtype)
    keeps = np.zeros(len(differs), np.bool_)
    keeps[tensor[kept]] = True
    arrays = [
        number_array(np.bincount(tensor).astype(np.int32)[tensor[leader]]),
        pa.array(keeps[tensor[leader]]),
        pa.array(differs[tensor[leader]]),
        number_array(far_rank[tensor[leader]], far_rank[tensor[leader]] >= 0),
        number_array(far[tensor[leader]], far_rank[tensor[leader]] >= 0),
    ]
    fields = _rolled_schema()
    columns = [*(taken.column(name).cast(fields.field(name).type) for name in COLUMNS), *arrays]
    return pa.Table.from_arrays(columns, schema=fields)


def _note_farthest(parts: Table, rows: Integers, tensor: Integers, far_rank: Any, far: Any) -> None:
    """Note the rank that is farthest from the median of each tensor, and how far it is."""
    value, of = parts.column("rm2")[rows], tensor[rows]
    if not len(rows):
        return
    order = np.lexsort((value, of))
    starts = np.flatnonzero(np.diff(of[order], prepend=-1))
    sizes = np.diff(np.append(starts, len(order)))
    median = np.zeros(len(far))
    median[of[order[starts]]] = value[order[starts + (sizes - 1) // 2]]
    with np.errstate(all="ignore"):
        distance = np.abs(value - median[of]) / np.abs(median[of])
    order = np.lexsort((np.nan_to_num(distance), of))
    last = order[np.append(starts[1:], len(order)) - 1][sizes > 1]
    far_rank[of[last]], far[of[last]] = parts.rank[rows[last]], distance[last]
