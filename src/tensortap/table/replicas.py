"""Which records of several ranks belong to one tensor, and replicas that differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.record import Kind
from tensortap.runs.arrow import coded, lists, numbers, row_indices
from tensortap.runs.rows import STATISTICS

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from tensortap.table.sources import Integers
    from tensortap.table.table import Table

    Booleans = NDArray[np.bool_]

_BATCHED = (Kind.ACTIVATION.value, Kind.GRADIENT.value)
_FREE = (Kind.VALUE.value, Kind.LOCAL.value)  # nobody knows what such values of ranks are
_PARAMETERS = (Kind.WEIGHT.value, Kind.WEIGHT_GRADIENT.value, Kind.OPTIMISER_STATE.value)
_PLACE = ["shape", "shard_shape", "shard_offsets", "shard_placements", "tags"]
_SPARSE = 4  # times as many possible codes as rows are looked up in an array, more are sorted


class Places(NamedTuple):
    """What rows are parts of; rows with the same batch and place are replicas."""

    batch: Integers
    place: Integers
    must_agree: Booleans  # replicas that are merged only if they are equal
    apart: Booleans  # rows that are never merged


def places_of(parts: Table, rows: Integers) -> Places:
    """Return what rows are parts of, by their shards and tags."""
    start = int(rows.min(initial=len(parts)))
    shapes: dict[Any, int] = {}
    batches: dict[Any, int] = {}
    # a chunk of a rank at a time: lists and texts of all ranks would fill the memory
    chunks = [_chunk_places(chunk, shapes, batches) for chunk in parts.read(_PLACE, start)]
    columns = zip(*chunks, strict=True) if chunks else [[np.empty(0, np.int64)]] * 5
    place, batch_of_layout, is_shard, has_layout, partial = (
        np.concatenate(column)[rows - start] for column in columns
    )
    batched, free = _has_kind(parts, rows, _BATCHED), _has_kind(parts, rows, _FREE)
    # without a layout, every rank has its own part of the batch
    of_batch = np.where(has_layout, -1 - batch_of_layout, parts.rank[rows])
    return Places(
        batch=np.where(batched, of_batch, 0),
        place=np.where(is_shard, place, -1),
        must_agree=~is_shard & (has_layout | ~batched),
        apart=partial | (free & ~is_shard),
    )


def _chunk_places(
    cells: pa.Table, shapes: dict[Any, int], batches: dict[Any, int]
) -> tuple[NDArray[Any], ...]:
    """Return the place, the batch, and whether rows are shards, have a layout, are partial sums.

    Places and batches are numbered over all chunks, by `shapes` and `batches`.
    """
    local = codes(*(_list_codes(cells.column(name)) for name in ("shape", "shard_offsets")))
    one_of_each = cells.select(["shape", "shard_offsets"]).take(row_indices(first_of(local)))
    keys = zip(*(column.to_pylist() for column in one_of_each.columns), strict=True)
    texts = [(tuple(shape or ()), tuple(offsets or ())) for shape, offsets in keys]
    place = np.array([shapes.setdefault(t, len(shapes)) for t in texts], np.int32)[local]
    layout, batch_tag, words = _tags(cells.column("tags"), "placements", "batch")
    words.append("")  # for rows without the tag, whose code is -1
    batch = np.array([batches.setdefault(w, len(batches)) for w in words], np.int32)[batch_tag]
    lengths, placements, words = _text_lists(cells.column("shard_placements"))
    is_sum = np.array([word.startswith("P") for word in words], np.bool_)[placements]
    sums, ends = np.append(0, np.cumsum(is_sum)), np.cumsum(lengths)
    partial = sums[ends] > sums[ends - lengths]
    flags = is_valid(cells.column("shard_shape")), layout >= 0, partial
    return place, batch, *flags


def same_tensor(parts: Table, rows: Integers) -> Integers:
    """Return the same number for rows that are parts or replicas of one tensor.

    The same call of a name may have been recorded twice on a rank: those are two tensors.
    """
    columns = (parts.kind, parts.name, parts.step, parts.call, parts.dtype)
    tensor = codes(*(column[rows] for column in columns))
    of_rank = codes(tensor, parts.rank[rows])
    repeated = np.flatnonzero(np.bincount(of_rank)[of_rank] > 1)
    if not len(repeated):
        return tensor
    order = repeated[np.lexsort((parts.seq[rows[repeated]], of_rank[repeated]))]
    starts = np.flatnonzero(np.diff(of_rank[order], prepend=-1))
    repeat = np.zeros(len(rows), np.int64)
    lengths = np.diff(np.append(starts, len(order)))
    repeat[order] = np.arange(len(order)) - np.repeat(starts, lengths)
    return codes(tensor, repeat)


def unequal_groups(parts: Table, rows: Integers, groups: Integers) -> Booleans:
    """Return which groups have rows whose statistics differ."""
    parts.prefetch(STATISTICS)
    first, differs = first_of(groups)[groups], np.zeros(len(rows), np.bool_)
    for name in STATISTICS:
        cells = parts.column(name)[rows].view(np.int64)
        differs |= cells != cells[first]
    return np.bincount(groups[differs], minlength=int(groups.max(initial=-1)) + 1) > 0


class UnequalReplica(NamedTuple):
    """Ranks whose replica of a parameter differs from that of most ranks, or from each other."""

    name: str
    kind: str
    first_step: int
    last_step: int
    ranks: list[int]
    replicas: int  # of how many ranks; as many as `ranks` if no side has the majority

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        steps = f"at step {self.first_step:,}"
        if self.last_step > self.first_step:
            steps = f"from step {self.first_step:,} to {self.last_step:,}"
        others = self.replicas - len(self.ranks)
        if not others:
            return f"ranks {ranks} differ in {self.name} ({self.kind}), {steps}"
        who = f"ranks {ranks} have" if len(self.ranks) > 1 else f"rank {ranks} has"
        return f"{who} another {self.name} ({self.kind}) than the other {others}, {steps}"


def unequal_replicas(parts: Table) -> list[UnequalReplica]:
    """Return the parameters whose replicas differ, by the first step.

    Ranks are outvoted by more than half of the replicas; without a majority, all are named.
    """
    rows = np.flatnonzero(_has_kind(parts, np.arange(len(parts)), _PARAMETERS))
    rows = rows[~np.isnan(parts.column("count")[rows])]
    if not len(rows):
        return []
    places = places_of(parts, rows)
    replicas = codes(same_tensor(parts, rows), places.place)
    unequal = unequal_groups(parts, rows, replicas)
    unequal[replicas[places.apart]] = False
    chosen = unequal[replicas]
    rows, replicas = rows[chosen], codes(replicas[chosen])
    content = codes(replicas, *(parts.column(name)[rows].view(np.int64) for name in STATISTICS))
    size = np.bincount(replicas)[replicas]
    is_right = 2 * np.bincount(content)[content] > size
    return _joined(parts, rows[~is_right], replicas[~is_right], size[~is_right])


def _joined(
    parts: Table, rows: Integers, replicas: Integers, sizes: Integers
) -> list[UnequalReplica]:
    """Return one entry per name, kind and ranks, over all steps."""
    order = np.lexsort((parts.rank[rows], replicas, parts.step[rows]))
    edges = np.flatnonzero(np.diff(replicas[order])) + 1
    joined: dict[Any, UnequalReplica] = {}
    for members in np.split(order, edges) if len(order) else ():
        row, size = rows[members[0]], int(sizes[members[0]])
        step, ranks = int(parts.step[row]), parts.rank[rows[members]].tolist()
        key = parts.name[row], parts.kind[row], size == len(ranks), tuple(ranks)
        if key in joined:
            size = max(size, joined[key].replicas)
            joined[key] = joined[key]._replace(last_step=step, replicas=size)
        else:
            title = parts.names[parts.name[row]], parts.kinds[parts.kind[row]]
            joined[key] = UnequalReplica(*title, step, step, ranks, size)
    return list(joined.values())


def _has_kind(parts: Table, rows: Integers, kinds: tuple[str, ...]) -> Booleans:
    return np.isin(parts.kind[rows], [i for i, kind in enumerate(parts.kinds) if kind in kinds])


def codes(*columns: Any) -> Integers:
    """Return numbers from 0 on that are equal where all columns are, in the order of the columns.

    >>> codes(np.array([7, 5, 7]), np.array([0, 0, 0]))
    array([1, 0, 1])
    """
    found = _dense(columns[0])
    for column in columns[1:]:
        more = _dense(column)
        found = _dense(found * (int(more.max(initial=0)) + 1) + more)
    return found


def _dense(values: NDArray[Any]) -> Integers:
    """Return the same values numbered from 0 on."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if high - low > _SPARSE * len(values):
        return np.unique(values, return_inverse=True)[1].astype(np.int64, copy=False)
    shifted = values.astype(np.int64) - low
    seen = np.zeros(high - low + 1, np.bool_)
    seen[shifted] = True
    return shifted if seen.all() else (np.cumsum(seen) - 1)[shifted]


def first_of(groups: Integers) -> Integers:
    """Return the position of the first member of each group.

    >>> first_of(np.array([1, 0, 1]))
    array([1, 0])
    """
    first = np.empty(int(groups.max(initial=-1)) + 1, np.int64)
    first[groups[::-1]] = np.arange(len(groups))[::-1]  # of several, the last one stays
    return first


def stable_order(numbers: Integers) -> Integers:
    """Return what sorts nonnegative numbers, as a stable argsort does: by 16 bits at a time.

    >>> stable_order(np.array([70000, 1, 70000, 0]))
    array([3, 1, 0, 2])
    """
    order = np.arange(len(numbers))
    for shift in range(0, int(numbers.max(initial=0)).bit_length(), 16):
        digits = (numbers >> shift).astype(np.uint16)  # which numpy sorts in linear time
        order = order[np.argsort(digits[order], kind="stable")]
    return order


def _list_codes(column: pa.ChunkedArray) -> Integers:
    """Return codes of a column of lists of integers."""
    lengths, items = lists(column)
    starts, items = np.cumsum(lengths) - lengths, np.append(items, 0)
    places = range(int(lengths.max(initial=0)))
    at = [np.where(lengths > i, items[np.where(lengths > i, starts + i, 0)], 0) for i in places]
    return codes(lengths, *at)


def _text_lists(column: pa.ChunkedArray) -> tuple[Integers, Integers, list[str]]:
    """Return the lengths of lists of texts, the codes of all items, and the texts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths = np.nan_to_num(numbers(pc.list_value_length(column))).astype(np.int64)
    items, texts = coded(pa.chunked_array([c.flatten() for c in column.chunks], pa.string()))
    return lengths, items.astype(np.int64), texts


def _tags(column: pa.ChunkedArray, *keys: str) -> tuple[Any, ...]:
    """Return the codes of the values that each tag has, -1 for none, and the values."""
    import pyarrow as pa

    cells = column.combine_chunks()
    ends = np.from_dlpack(cells.offsets) if len(cells) else np.zeros(1, np.int32)
    inside = slice(int(ends[0]), int(ends[-1]))
    names, known = coded(pa.chunked_array([cells.keys[inside]], pa.string()))
    items, texts = coded(pa.chunked_array([cells.items[inside]], pa.string()))
    row = np.repeat(np.arange(len(cells)), np.diff(ends))
    found = []
    for key in keys:
        codes_of_row = np.full(len(cells), -1)
        if key in known:
            at = np.flatnonzero(names == known.index(key))
            codes_of_row[row[at]] = items[at]
        found.append(codes_of_row)
    return *found, texts


def is_valid(column: pa.ChunkedArray) -> Booleans:
    """Return which cells of a column are not null."""
    import pyarrow.compute as pc

    return numbers(pc.cast(pc.is_valid(column), "int8")) > 0
