"""Where the rows of a table come from: a run, records in memory, a frame.

A feed hands over the heads of rows once, when they are new, and columns of statistics only when
they are asked for. Its rows are numbered in the order in which it handed them over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from tensortap.alerts import Alert, alert_of
from tensortap.readers.run import RunReader
from tensortap.record import Kind, Record, Summary
from tensortap.runs.arrow import coded, lists, numbers
from tensortap.runs.rows import STATISTICS, decode_value, number_of
from tensortap.table.run_columns import RunColumns, Stretch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Reals = NDArray[np.float64]
    Whole = NDArray[np.int64]

VALUE = "value"  # the column of records that are single numbers
GIVEN = "given"  # 1 where a record is one, NaN or not: a tensor of which nothing is known is none
_HEADS = ["name", "kind", "dtype", "step", "rank", "call", "seq", "missing"]
_ALERT = ["name", "step", "call", "seq", "rank", "value"]


class Words(NamedTuple):
    """A column of words: numbers, and what they mean."""

    codes: NDArray[np.int32]
    words: Sequence[str]


class Heads(NamedTuple):
    """What new rows are about."""

    name: Words
    kind: Words
    dtype: Words
    step: Whole
    rank: Whole
    call: Whole
    seq: Whole


class Bins(NamedTuple):
    """The exponent counts of rows: the first bin and how many there are of each, and all counts."""

    first: Whole
    lengths: Whole
    counts: Whole


class Feed(Protocol):
    """Hands over rows."""

    def statistics(self) -> list[str]:
        """The columns of numbers that can be asked for."""
        ...

    def fresh(self) -> Heads | None:
        """The heads of rows that are new, or None."""
        ...

    def column(self, name: str, start: int) -> Reals:
        """A statistic of all rows from one on; NaN where there is none."""
        ...

    def bins(self, rows: Whole) -> Bins:
        """The exponent counts of some rows; the rows rise."""
        ...

    def beyond(self, rows: Whole) -> tuple[Whole, Whole]:
        """How many values of rows lie below, and above, the exponents that were counted."""
        ...

    def recomputed(self, rows: Whole) -> NDArray[np.bool_]:
        """Which of some rows are of values that were computed a second time; the rows rise."""
        ...

    def alerts(self) -> list[Alert]:
        """The alerts so far."""
        ...


class RunFeed:
    """The rows of a run on disk, finished or growing."""

    def __init__(self, reader: RunReader) -> None:
        self.reader = reader
        self._columns = RunColumns(reader)
        self._stretches: list[Stretch] = []
        self._kept: list[Whole | None] = []  # rows of each that are there; None: all
        self._ends = np.zeros(1, np.int64)
        self._looked = False
        self._alert_rows = np.empty(0, np.int64)  # that have not been read
        self._alerts: list[tuple[tuple[int, int, int], Alert]] = []

    def statistics(self) -> list[str]:
        return [*STATISTICS, VALUE]

    def fresh(self) -> Heads | None:
        if self._looked:
            self.reader.refresh()
        self._looked = True
        stretches = self._columns.fresh()
        if not stretches:
            return None
        columns: dict[str, list[Any]] = {name: [] for name in _HEADS[3:7]}
        words: dict[str, tuple[dict[str, int], list[Any]]] = {n: ({}, []) for n in _HEADS[:3]}
        for stretch, table in zip(stretches, self._columns.read(stretches, _HEADS), strict=True):
            kept = _here(table.column("missing"))
            self._stretches.append(stretch)
            self._kept.append(kept)
            for name, found in columns.items():
                found.append(_taken(numbers(table.column(name)), kept))
            for name, (known, parts) in words.items():
                codes, called = coded(table.column(name))
                places = [known.setdefault(word, len(known)) for word in called]
                parts.append(np.array(places, np.int32)[_taken(codes, kept)])
        sizes = [
            stretch.size if kept is None else len(kept)
            for stretch, kept in zip(self._stretches, self._kept, strict=True)
        ]
        before = int(self._ends[-1])
        self._ends = np.concatenate([[0], np.cumsum(sizes)])
        texts = [Words(np.concatenate(parts), list(known)) for known, parts in words.values()]
        whole = [np.concatenate(found).astype(np.int64) for found in columns.values()]
        code = words["kind"][0].get(Kind.ALERT.value, -1)
        said = before + np.flatnonzero(texts[1].codes == code)
        self._alert_rows = np.concatenate([self._alert_rows, said])
        return Heads(texts[0], texts[1], texts[2], *whole)

    def column(self, name: str, start: int) -> Reals:
        first = int(np.searchsorted(self._ends, start, side="right")) - 1
        stretches, kept = self._stretches[first:], self._kept[first:]
        wanted = "number" if name in (VALUE, GIVEN) else name
        found = [
            _taken(
                _valid(table.column(wanted)) if name == GIVEN else numbers(table.column(wanted)),
                rows,
            )
            for rows, table in zip(kept, self._columns.read(stretches, [wanted]), strict=True)
        ]
        if not found:
            return np.empty(0)
        return np.concatenate(found).astype(np.float64)[start - self._ends[first] :]

    def bins(self, rows: Whole) -> Bins:
        parts = list(self._picked(rows, ["first_bin", "bins"]))
        empty = np.empty(0, np.int64)
        both = [lists(table.column("bins")) for table in parts]
        first = [np.nan_to_num(numbers(table.column("first_bin"))) for table in parts]
        return Bins(
            np.concatenate([empty, *first]).astype(np.int64),
            np.concatenate([empty, *(lengths for lengths, _ in both)]),
            np.concatenate([empty, *(counts for _, counts in both)]),
        )

    def beyond(self, rows: Whole) -> tuple[Whole, Whole]:
        return _none(rows)

    def recomputed(self, rows: Whole) -> NDArray[np.bool_]:
        import pyarrow.compute as pc

        found = []
        for table in self._picked(rows, ["tags"]):
            tag = pc.map_lookup(table.column("tags"), "recompute", "first")
            mine = np.zeros(table.num_rows, np.bool_)
            mine[numbers(pc.indices_nonzero(pc.is_valid(tag)).cast("int64"))] = True
            found.append(mine)
        return np.concatenate([np.empty(0, np.bool_), *found])

    def alerts(self) -> list[Alert]:
        if len(self._alert_rows):
            rows, self._alert_rows = self._alert_rows, np.empty(0, np.int64)
            for table in self._picked(rows, _ALERT):
                columns = [table.column(name).to_pylist() for name in _ALERT]
                for name, step, call, seq, rank, data in zip(*columns, strict=True):
                    value = decode_value(data)
                    record = Record(name, Kind.ALERT, step, call, seq, rank, 1, 0, value=value)
                    self._alerts.append(((step, seq, rank), alert_of(record)))
            self._alerts.sort(key=lambda each: each[0])
        return [alert for _, alert in self._alerts]

    def _picked(self, rows: Whole, columns: list[str]) -> Iterator[Any]:
        """Some columns of some rows, which rise, as many at a time as lie together."""
        places = np.searchsorted(self._ends, rows, side="right") - 1
        for place in np.unique(places).tolist():
            stretch, kept = self._stretches[place], self._kept[place]
            mine = rows[places == place] - self._ends[place]
            mine = stretch.start + (mine if kept is None else kept[mine])
            yield self._columns.pick(stretch.rank, stretch.part, mine, columns)


def _here(missing: Any) -> Whole | None:
    import pyarrow.compute as pc

    if not pc.any(missing).as_py():
        return None
    return numbers(pc.indices_nonzero(pc.invert(missing.combine_chunks())).cast("int64"))


def _taken(column: NDArray[Any], rows: Whole | None) -> NDArray[Any]:
    return column if rows is None else column[rows]


class RecordFeed:
    """Records that are asked for as they come: of a live session, of a tracker, of a list."""

    def __init__(self, ask: Callable[[], Iterable[Record]], *, forgets: bool = False) -> None:
        self._ask = ask
        self.forgets = forgets  # a live session makes room for what is new
        self._stats: list[Summary | None] = []
        self._numbers: list[float | None] = []
        self._alerts: list[Alert] = []
        self._again: set[int] = set()  # rows of what was computed a second time
        self._codes: dict[str, dict[str, int]] = {"name": {}, "kind": {}, "dtype": {}}

    def statistics(self) -> list[str]:
        return [*STATISTICS, VALUE]

    def fresh(self) -> Heads | None:
        records = []
        for record in self._ask():
            if record.kind is Kind.ALERT:
                self._alerts.append(alert_of(record))
            else:
                records.append(record)
        if not records:
            return None
        start = len(self._stats)
        self._again.update(n for n, r in enumerate(records, start) if "recompute" in r.tags)
        self._stats += [record.stats for record in records]
        self._numbers += [number_of(record.value) for record in records]
        return Heads(
            self._words("name", [record.name for record in records]),
            self._words("kind", [record.kind.value for record in records]),
            self._words("dtype", [record.dtype for record in records]),
            *(
                np.array([getattr(record, field) for record in records], np.int64)
                for field in ("step", "rank", "call", "seq")
            ),
        )

    def _words(self, column: str, words: list[str]) -> Words:
        known = self._codes[column]
        codes = [known.setdefault(word, len(known)) for word in words]
        return Words(np.array(codes, np.int32), list(known))

    def column(self, name: str, start: int) -> Reals:
        if name == VALUE:
            return np.array(self._numbers[start:], np.float64)
        if name == GIVEN:
            return np.array([each is not None for each in self._numbers[start:]], np.float64)
        lacking = np.nan
        found = [
            lacking if stats is None else getattr(stats, name)
            for stats in itertools.islice(self._stats, start, None)
        ]
        return np.array(found, np.float64)

    def bins(self, rows: Whole) -> Bins:
        stats = [self._stats[row] for row in rows.tolist()]
        counts = [() if each is None else each.bins for each in stats]
        first = [0 if each is None else each.first_bin for each in stats]
        flat = np.fromiter(itertools.chain.from_iterable(counts), np.int64)
        return Bins(np.array(first, np.int64), np.array([len(c) for c in counts], np.int64), flat)

    def beyond(self, rows: Whole) -> tuple[Whole, Whole]:
        return _none(rows)

    def recomputed(self, rows: Whole) -> NDArray[np.bool_]:
        return np.array([row in self._again for row in rows.tolist()], np.bool_)

    def alerts(self) -> list[Alert]:
        return sorted(self._alerts, key=lambda alert: (alert.step, alert.rank))


class FrameFeed:
    """The rows of a LogFrame: what it holds now."""

    def __init__(self, frame: Any) -> None:
        from tensortap.table.logframe_schema import validate_logframe

        self._frame = validate_logframe(frame)
        self._given = False

    def statistics(self) -> list[str]:
        return [str(name) for name in self._frame["scalar_stats"].columns]

    def fresh(self) -> Heads | None:
        if self._given:
            return None
        self._given = True
        meta = self._frame["metadata"]
        kinds, states = (
            zip(*(text.partition(".")[::2] for text in meta["tensor_type"]), strict=True)
            if len(meta)
            else ((), ())
        )
        names = [
            f"{name}.{state}" if state else name
            for name, state in zip(meta["name"], states, strict=True)
        ]
        step = meta["step"].to_numpy(np.int64)
        call = meta["call"].to_numpy(np.int64) if "call" in meta else np.zeros_like(step)
        return Heads(
            _words(names),
            _words(kinds),
            _words(meta["dtype"]),
            step,
            meta["rank"].to_numpy(np.int64),
            call,
            np.arange(len(step)),
        )

    def column(self, name: str, start: int) -> Reals:
        if name == GIVEN:  # it has statistics, and no single numbers
            return np.zeros(len(self._frame) - start)
        found = self._frame["scalar_stats"]
        column: Reals = found[{str(c): c for c in found.columns}[name]].to_numpy(np.float64)
        return column[start:]

    def bins(self, rows: Whole) -> Bins:
        found = self._frame["exponent_counts"]
        whole = [label for label in found.columns if isinstance(label, int)]
        counts = found[whole].to_numpy(np.int64)[rows]
        low, high = min(whole), max(whole)
        dense = np.zeros((len(rows), high - low + 1), np.int64)
        dense[:, np.array(whole) - low] = counts
        size = dense.shape[1]
        return Bins(np.full(len(rows), low), np.full(len(rows), size), dense.ravel())

    def beyond(self, rows: Whole) -> tuple[Whole, Whole]:
        found, figures = self._frame["exponent_counts"], self._frame["scalar_stats"]
        below, above = (found[end].to_numpy(np.int64)[rows] for end in (-np.inf, np.inf))
        # infinities are counted above the range, and also as what they are
        known = [figures[c].to_numpy()[rows] for c in ("posinfs", "neginfs") if c in figures]
        return below, above - np.asarray(sum(known, np.zeros(len(rows)))).astype(np.int64)

    def recomputed(self, rows: Whole) -> NDArray[np.bool_]:
        return np.zeros(len(rows), np.bool_)

    def alerts(self) -> list[Alert]:
        return []


def _none(rows: Whole) -> tuple[Whole, Whole]:
    """All exponents were counted."""
    return np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)


def _valid(column: Any) -> Reals:
    """1 where a column has something, else 0."""
    import pyarrow.compute as pc

    return numbers(pc.cast(pc.is_valid(column), "float64"))


def _words(column: Iterable[str]) -> Words:
    known: dict[str, int] = {}
    codes = [known.setdefault(word, len(known)) for word in column]
    return Words(np.array(codes, np.int32), list(known))


def feed_of(source: Any) -> Feed:
    """The feed of anything that holds statistics.

    A run or its reader, a live session (its server, its history, a view of one elsewhere), a
    tracker, records, a LogFrame.
    """
    # a run and a view of a live session have a reader, a server has a history
    source = getattr(source, "reader", None) or getattr(source, "history", None) or source
    if isinstance(source, RunReader):
        return RunFeed(source)
    since = getattr(source, "since", None)
    if since is not None:
        return RecordFeed(_Following(since), forgets=True)
    if hasattr(source, "columns") and hasattr(source, "attrs"):
        return FrameFeed(source)
    records = getattr(source, "records", source)
    if not isinstance(records, Iterable) or isinstance(records, (str, bytes)):
        raise TypeError(
            "figures are drawn of a run (tap.open), a live session (tap.serve), a tracker or a "
            f"LogFrame, not of a {type(source).__name__}"
        )
    return RecordFeed(_Again(source))


class _Following:
    """Asks for what came after the last answer."""

    def __init__(self, since: Callable[[int], tuple[int, list[Record]]]) -> None:
        self._since = since
        self._cursor = 0

    def __call__(self) -> Iterable[Record]:
        while True:
            before = self._cursor
            self._cursor, records = self._since(before)
            yield from records
            if self._cursor == before:
                return


class _Again:
    """Goes through all records again, and gives those that it has not given before."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._given = 0

    def __call__(self) -> Iterable[Record]:
        records = getattr(self._source, "records", self._source)
        for record in itertools.islice(records, self._given, None):
            self._given += 1
            yield record
