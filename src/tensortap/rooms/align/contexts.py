"""The identity of a token: the hash of its context, which is all tokens up to and including it.

Each token is hashed with its place in its sequence, and the hashes of a context are added, modulo
2^64: one cumulative sum gives the identities of a whole run. Two of n different contexts have the
same identity with a probability of n² / 2^65: one in 18 million for a million tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap import values as frameworks
from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.record import Kind
from tensortap.rooms.align.tokens import STEPPED, TOKENS, rows_of
from tensortap.runs.run_reader import RunReader
from tensortap.values.view import array_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Hashes = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_COLUMNS = ["name", "step", "seq", "rank", "dtype", "kind", "tags", "value", "payloads", "missing"]
BY_TOKEN = " by token"  # suffix of the names of rows that `track(tokens=)` records


def mixed(values: Hashes) -> Hashes:
    """Return well mixed 64 bits of each number (the finalizer of splitmix64)."""
    z = values + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def identities(tokens: Integers, places: Integers, starts: Integers) -> Hashes:
    """Return the identities of tokens, which lie sequence by sequence; `starts` are of each token.

    >>> ids = np.array([5, 6, 7, 5, 6])
    >>> found = identities(ids, np.array([0, 1, 2, 0, 1]), np.array([0, 0, 0, 3, 3]))
    >>> bool((found[:2] == found[3:]).all()), len(set(found.tolist()))
    (True, 3)
    """
    each = mixed(mixed(tokens.astype(np.uint64)) + places.astype(np.uint64) * _GOLDEN)
    total = np.cumsum(each, dtype=np.uint64)
    before = total[starts] - each[starts]
    return mixed(total - before)


class TokenTable(NamedTuple):
    """All tokens of a run without padding, sequence by sequence; one entry per token."""

    identity: Hashes
    token: Integers
    place: Integers  # in its sequence, from 0
    position: Integers  # as it was given; -1 if it was not
    first: Integers  # the entry at which its sequence begins
    step: Integers  # the training step, or 0
    batch: Integers  # number of the record that describes it
    decoded: NDArray[np.bool_]  # whether an earlier batch holds the beginning of its sequence
    is_stepped: bool  # whether the program has training steps

    def context(self, entry: int, most: int = 12) -> list[int]:
        """Return the last tokens of a context."""
        begin = max(int(self.first[entry]), entry + 1 - most)
        return [int(token) for token in self.token[begin : entry + 1]]


class TokenRows(NamedTuple):
    """The rows of one name in a run: the token of each row, and its value."""

    entry: Integers  # of the table
    value: NDArray[Any]
    dtype: str  # of the tensor that was observed
    type: str = ""  # class of the module


class TokenRun(NamedTuple):
    """The tokens of a run, and the values that refer to them."""

    path: str
    reader: Any
    table: TokenTable
    names: dict[str, TokenRows]
    unknown: int  # values whose tokens are not in the run
    batches: list[dict[str, Any]]  # tokens and masks as they were passed
    begins: Integers  # place of each entry in the tokens of its batch


def read_tokens(source: Any) -> TokenRun:
    """Read the tokens of a run, and the values that refer to them."""
    reader = RunReader(source) if isinstance(source, (str, Path)) else source
    reader = getattr(reader, "reader", reader)
    rows = list(_stored_rows(reader) if isinstance(reader, RunReader) else _rows(reader))
    path = str(getattr(source, "path", source))
    described = [row for row in rows if row.name == TOKENS and TOKENS not in row.tags]
    if not described:
        raise NotFound(
            f"{path} has no tokens: tap.catch(value, name, tokens=ids) or "
            "tap.track(model, tokens='input_ids') records them"
        )
    batches = [frameworks.rebuild(row.load()) for row in described]
    numbers = {(row.rank, row.seq): i for i, row in enumerate(described)}
    table, entries = _table(described, batches)
    shared = _Entries(entries, [batch["tokens"].shape for batch in batches])
    named: dict[str, list[tuple[_Row, int, NDArray[Any]]]] = {}
    unknown = 0
    for row in rows:  # in the order in which files hold them
        if TOKENS in row.tags:
            number = numbers.get((row.rank, int(row.tags[TOKENS])))
            if number is None:
                unknown += 1
            else:
                named.setdefault(row.name, []).append((row, number, _array(row.load())))
    # the parts of a name are freed when they are joined
    joined = {name: _joined(name, named.pop(name), shared) for name in list(named)}
    begins = np.empty(len(table.identity), np.int64)
    for entry in entries:
        begins[entry[entry >= 0]] = np.flatnonzero(entry >= 0)
    return TokenRun(path, reader, table, joined, unknown, batches, begins)


class _Row(NamedTuple):
    name: str
    step: int
    seq: int
    rank: int
    dtype: str
    tags: dict[str, str]
    load: Any


def _rows(reader: Any) -> Iterator[_Row]:
    """Yield the records of tokens, and those that refer to them, in the order of capture."""
    for name in reader.names():
        for each in reader.records(name):
            if each.name == TOKENS or TOKENS in each.tags:
                load = functools.partial(lambda record: reader.load(record).value, each)
                yield _Row(name, each.step, each.seq, each.rank, each.dtype, each.tags, load)


def _stored_rows(reader: RunReader) -> Iterator[_Row]:
    import pyarrow.compute as pc

    table = reader.table(_COLUMNS)
    tagged = pc.is_valid(pc.map_lookup(table.column("tags"), TOKENS, "first"))
    is_value = pc.equal(table.column("kind"), Kind.VALUE.value)
    wanted = pc.and_(pc.or_(tagged, pc.equal(table.column("name"), TOKENS)), is_value)
    wanted = pc.and_(wanted, pc.invert(table.column("missing")))
    for cells in table.filter(wanted).to_pylist():
        load = functools.partial(reader.value_of, cells["value"], cells["payloads"])
        tags = dict(cells["tags"] or ())
        name, step, seq, rank, dtype = (cells[each] for each in _COLUMNS[:5])
        yield _Row(name, step, seq, rank, dtype, tags, load)


def _array(value: Any) -> NDArray[Any]:
    """Return a value as an array; of formats that NumPy lacks, as float32."""
    array = array_of(value)
    found = np.asarray(frameworks.rebuild(value)) if array is None else array
    return found.astype(np.float32) if found.dtype.kind not in "fiub" else found


class _Entries:
    """Entries of the rows of names, shared by names with rows of the same batches."""

    def __init__(self, of_batches: list[Integers], shapes: list[tuple[int, ...]]) -> None:
        self.shapes = shapes
        self._of_batches = of_batches
        self._joined: dict[tuple[tuple[int, int], ...], tuple[Integers, Any]] = {}

    def rows(self, parts: tuple[tuple[int, int], ...]) -> tuple[Integers, Any]:
        """Return entries, and which rows they are of, given batches and tokens per row."""
        if parts not in self._joined:
            found = []
            for number, length in parts:
                rows = self._of_batches[number].reshape((1, *self.shapes[number])[-2:])
                found.append(rows[:, rows.shape[1] - length :].reshape(-1))
            entry = np.concatenate(found)
            kept = entry >= 0  # the rest is padding
            self._joined[parts] = (entry, slice(None)) if kept.all() else (entry[kept], kept)
        return self._joined[parts]


def _joined(name: str, parts: list[tuple[_Row, int, NDArray[Any]]], entries: _Entries) -> TokenRows:
    """Return the rows of a name in all batches."""
    values, lengths = [], []
    for _, number, value in parts:
        dims, length = rows_of(value.shape, entries.shapes[number])
        values.append(value.reshape(-1, *value.shape[dims:]))
        lengths.append((number, length))
    shapes = {each.shape[1:] for each in values}
    if len(shapes) > 1:
        raise TensortapError(f"{name!r} has rows of shapes {' and '.join(map(str, shapes))}")
    entry, kept = entries.rows(tuple(lengths))
    row = parts[0][0]
    dtype = row.tags.get("dtype", row.dtype)
    return TokenRows(entry, np.concatenate(values)[kept], dtype, row.tags.get("class", ""))


def _table(
    described: list[_Row], batches: list[dict[str, Any]]
) -> tuple[TokenTable, list[Integers]]:
    """Return the tokens sequence by sequence, and the entry of each token as it was passed."""
    for batch in batches:
        for name in ("tokens", "positions", "mask", "cu_seqlens"):
            if name in batch:
                batch[name] = _array(batch[name])
    pairs = zip(described, batches, strict=True)
    parts = [_batch_columns(i, row, batch) for i, (row, batch) in enumerate(pairs)]
    token, position, valid, place_key = map(np.concatenate, zip(*parts, strict=True))
    sizes = [len(part[0]) for part in parts]
    number = np.repeat(np.arange(len(parts)), sizes)
    step = np.repeat([row.step for row in described], sizes)
    # the keys of sequences that continue are shared by batches; all others are of their batch alone
    kept = np.flatnonzero(valid)
    order = kept[np.argsort(place_key[kept], kind="stable")]
    key = place_key[order]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = key[1:] != key[:-1]
    first = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
    place = np.arange(len(order)) - first
    entry = np.full(len(token), -1, np.int64)
    entry[order] = np.arange(len(order))
    table = TokenTable(
        identities(token[order], place, first), token[order], place, position[order], first,
        step[order], number[order], number[order] != number[order][first],
        all(STEPPED in row.tags for row in described),
    )  # fmt: skip
    return table, np.split(entry, np.cumsum(sizes)[:-1])


def _batch_columns(number: int, row: _Row, batch: dict[str, Any]) -> tuple[NDArray[Any], ...]:
    """Return token, position, whether it is no padding, and the key of its sequence, of a batch."""
    tokens = batch["tokens"].astype(np.int64)
    shape = tokens.shape if tokens.ndim == 2 else (1, tokens.size)
    tokens = tokens.reshape(-1)
    mask = np.broadcast_to(batch.get("mask", np.ones(shape, np.int64)), shape).astype(np.int64)
    valid = mask.reshape(-1) != 0
    given = batch.get("positions")
    position = np.full(tokens.shape, -1, np.int64)
    if given is not None:
        position = np.ascontiguousarray(np.broadcast_to(given, shape)).reshape(-1).astype(np.int64)
    begins = np.zeros(shape, np.bool_)
    begins[:, 0] = True
    begins[:, 1:] |= (mask[:, 1:] != mask[:, :-1]) & (mask[:, 1:] > 1)  # numbers of sequences
    begins = begins.reshape(-1)
    if "cu_seqlens" in batch:
        inside = batch["cu_seqlens"].astype(np.int64)
        begins[inside[(inside > 0) & (inside < len(begins))]] = True
    names = batch.get("sequence")
    if given is not None and names is None:
        rows = np.repeat(np.arange(shape[0]), shape[1])[valid]
        own = position[valid]
        restarts = np.flatnonzero((own[1:] <= own[:-1]) & (rows[1:] == rows[:-1])) + 1
        begins[np.flatnonzero(valid)[restarts]] = True
    segment = np.cumsum(begins) - 1
    keys = np.arange(segment[-1] + 1, dtype=np.int64) if len(segment) else np.empty(0, np.int64)
    keys = keys + (np.int64(number) << 24)
    if names is not None:
        if len(names) != len(keys):
            raise TensortapError(f"{len(names)} sequences are named for {len(keys)} of tokens")
        keys = np.array([_sequence_key(row.rank, row.step, name) for name in names], np.int64)
    return tokens, position, valid, keys[segment]


def _sequence_key(rank: int, step: int, name: str) -> int:
    import xxhash

    bits: int = xxhash.xxh3_64_intdigest(f"{rank}/{step}/{name}".encode())
    return -1 - (bits >> 1)  # negative: apart from those of batches
