"""Which records of two runs belong together, and which of them are plainly the same."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from tensortap.compare.columns import KEY
from tensortap.errors import TensortapError
from tensortap.record import Kind
from tensortap.runs.rows import STATISTICS

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray


class Choice(NamedTuple):
    """What of two runs is compared."""

    names: str | None = None
    kinds: tuple[str, ...] = ()
    steps: tuple[int | None, int | None] | None = None  # the first and the last, both included
    ranks: tuple[int, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()  # (pattern, replacement): names of A → of B


class Pairs(NamedTuple):
    """Row numbers: of A and B side by side, and of what only one has."""

    a: NDArray[np.int64]
    b: NDArray[np.int64]
    only_a: NDArray[np.int64]
    only_b: NDArray[np.int64]


def parse_mapping(text: str) -> tuple[str, str]:
    r"""``old\.(.*)=new.\1`` as a pattern and its replacement.

    >>> parse_mapping(r"h\.(\d+)=blocks.\1")
    ('h\\.(\\d+)', 'blocks.\\1')
    """
    pattern, found, replacement = text.partition("=")
    if not found or not pattern:
        raise TensortapError(f"a mapping is 'pattern=replacement', not {text!r}")
    try:
        re.compile(pattern)
        re.sub(pattern, replacement, "")
    except (re.error, IndexError) as error:
        raise TensortapError(f"the mapping {text!r} cannot be used: {error}") from None
    return pattern, replacement


def chosen(table: pa.Table, choice: Choice, *, rename: bool) -> pa.Table:
    """The rows that are to be compared, names of A as B spells them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from tensortap.runs.arrow import column, scalar

    names = table.column("name")
    if rename and choice.renames:
        unique = names.unique().to_pylist()
        renamed = [_renamed(name, choice.renames) for name in unique]
        _check_renames(unique, renamed)
        places = pc.index_in(names, column(unique, pa.string()))
        names = column(renamed, pa.string()).take(places.combine_chunks())
        table = table.set_column(table.column_names.index("name"), "name", names)
    if not choice.kinds:
        # what one of them was asked to look out for is nothing that the training did
        alerts = pc.is_in(table.column("kind"), column([Kind.ALERT.value], pa.string()))
        table = table.filter(pc.invert(alerts))
    if choice._replace(renames=()) == Choice():
        return table
    keep = pc.is_valid(table.column("name"))
    if choice.names is not None:
        try:
            re.compile(choice.names)
        except re.error as error:
            raise TensortapError(f"not a regular expression: {choice.names!r} ({error})") from None
        held = table.column("name").unique().to_pylist()
        wanted = [name for name in held if re.search(choice.names, name)]
        keep = pc.and_(keep, pc.is_in(table.column("name"), column(wanted, pa.string())))
    if choice.kinds:
        wanted_kinds = column(list(choice.kinds), pa.string())
        keep = pc.and_(keep, pc.is_in(table.column("kind"), wanted_kinds))
    if choice.ranks:
        wanted_ranks = column(list(choice.ranks), pa.int32())
        keep = pc.and_(keep, pc.is_in(table.column("rank"), wanted_ranks))
    if choice.steps is not None:
        low, high = choice.steps
        step = table.column("step")
        if low is not None:
            keep = pc.and_(keep, pc.greater_equal(step, scalar(low, step.type)))
        if high is not None:
            keep = pc.and_(keep, pc.less_equal(step, scalar(high, step.type)))
    return table.filter(keep)


def _renamed(name: str, renames: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


def _check_renames(before: list[str], after: list[str]) -> None:
    seen: dict[str, str] = {}
    for old, new in zip(before, after, strict=True):
        other = seen.setdefault(new, old)
        if other != old:
            raise TensortapError(f"the mapping makes {new!r} of both {other!r} and {old!r}")


def pair(a: pa.Table, b: pa.Table) -> Pairs:
    """Match the rows by name, kind, step, call and rank."""
    import numpy as np

    if a.select(list(KEY)).equals(b.select(list(KEY))):  # the same program: row by row
        every = np.arange(a.num_rows)
        return Pairs(every, every, every[:0], every[:0])
    left, right = _numbered(a), _numbered(b)
    joined = left.join(
        right, list(KEY), join_type="full outer", left_suffix="_a", right_suffix="_b"
    )
    rows_a, rows_b = joined.column("row_a"), joined.column("row_b")
    has_a, has_b = (np.asarray(rows.is_valid()) for rows in (rows_a, rows_b))
    number_a, number_b = (np.asarray(rows.fill_null(-1)) for rows in (rows_a, rows_b))
    both = has_a & has_b
    return Pairs(number_a[both], number_b[both], number_a[~has_b], number_b[~has_a])


def _numbered(table: pa.Table) -> pa.Table:
    import numpy as np
    import pyarrow as pa

    kept = table.select(list(KEY))
    return kept.append_column("row", pa.array(np.arange(table.num_rows)))


def same(a: pa.Table, b: pa.Table, pairs: Pairs, *, equal_nan: bool) -> NDArray[np.bool_]:
    """Which pairs need no look at their values: the digests are the same, or the bytes.

    Without `equal_nan` equal bytes may still differ, where they hold a NaN.
    """
    import numpy as np
    import pyarrow.compute as pc

    if not equal_nan or not len(pairs.a):
        return np.zeros(len(pairs.a), np.bool_)

    def cells(name: str) -> tuple[Any, Any]:
        return _taken(a.column(name), pairs.a), _taken(b.column(name), pairs.b)

    def equal(name: str) -> NDArray[np.bool_]:
        one, other = cells(name)
        return np.asarray(pc.fill_null(pc.equal(one, other), False))

    def absent(name: str) -> NDArray[np.bool_]:
        one, other = cells(name)
        return np.asarray(pc.and_(pc.is_null(one), pc.is_null(other)))

    whole = equal("digest") & equal("dtype")
    inline = equal("value") & absent("payloads") & ~absent("value")
    # the values of dumped objects are in files of their own
    dumped = np.asarray(pc.is_valid(pc.map_lookup(cells("tags")[0], "file", "first")))
    found = whole | (inline & ~dumped & ~_nothing(a, pairs.a))
    statistics = _nothing(a, pairs.a) & _nothing(b, pairs.b) & ~absent("count")
    for name in STATISTICS if statistics.any() else ():
        one, other = cells(name)
        alike = pc.or_(pc.equal(one, other), pc.and_(pc.is_null(one), pc.is_null(other)))
        if name not in STATISTICS[:5]:
            alike = pc.or_(alike, pc.and_(pc.is_nan(one), pc.is_nan(other)))
        statistics &= np.asarray(pc.fill_null(alike, False))
    merged: NDArray[np.bool_] = found | statistics
    return merged


_NIL = b"\xc0"


def _nothing(table: pa.Table, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which rows have no value, only statistics."""
    import numpy as np
    import pyarrow.compute as pc

    from tensortap.runs.arrow import scalar

    value = _taken(table.column("value"), rows)
    nil = pc.equal(value, scalar(_NIL, value.type))
    counted = pc.is_valid(_taken(table.column("count"), rows))
    # of a live session it is not known yet: null
    return np.asarray(pc.and_(pc.fill_null(nil, False), counted))


def _taken(column: Any, rows: NDArray[np.int64]) -> Any:
    """Some rows of a column; all of them, in order, as they are."""
    import numpy as np
    import pyarrow as pa

    if len(rows) == len(column) and (rows == np.arange(len(column))).all():
        return column
    return column.take(pa.array(rows))
