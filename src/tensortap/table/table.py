"""All statistics of a source as columns: what every figure is drawn from.

    table = table_of(run)
    rows = table.rows(kind="Activation", names=["output"])
    table.step[rows], table.column("rm2")[rows]

A column is read when it is first asked for; `refresh` takes in what is new and nothing else.
"""

from __future__ import annotations

import difflib
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from tensortap.errors import NotFound
from tensortap.readers.run import RunReader
from tensortap.record import Kind
from tensortap.stats.formats import Exponents
from tensortap.table.feeds import GIVEN, VALUE, Feed, Heads, RecordFeed, feed_of
from tensortap.table.logframe_schema import KINDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tensortap.alerts import Alert
    from tensortap.table.feeds import Reals, Whole

Rest = ParamSpec("Rest")
Drawn = TypeVar("Drawn")
NONFINITE = "nonfinite"
_NOT_FINITE = ("nans", "posinfs", "neginfs")
_ASIDE = (Kind.METRIC.value, Kind.ALERT.value)
_KINDS = tuple(kind.value for kind in KINDS)  # what a model is made of comes first
_MOST = 1_000_000  # rows of a live session, which forgets: a table does so, too


class Column:
    """An array that grows at its end."""

    def __init__(self, dtype: type) -> None:
        self._held: NDArray[Any] = np.empty(0, dtype)
        self.size = 0

    def extend(self, values: NDArray[Any]) -> None:
        end = self.size + len(values)
        if end > len(self._held):
            wider = np.empty(max(end, 2 * self.size), self._held.dtype)
            wider[: self.size] = self._held[: self.size]
            self._held = wider
        self._held[self.size : end] = values
        self.size = end

    @property
    def values(self) -> NDArray[Any]:
        return self._held[: self.size]


class Table:
    """Statistics by rows (a record each) and columns; see `table_of`."""

    def __init__(self, feed: Feed, again: Callable[[], Feed] | None = None) -> None:
        self.version = 0  # rises when rows have come
        self.lock = threading.RLock()  # held while a figure is drawn: rows are what they were
        self._again = again
        self._limit = _MOST
        self._begin(feed)
        self.refresh()

    def _begin(self, feed: Feed) -> None:
        self._feed = feed
        self.names: list[str] = []  # what the numbers of `name` mean, in the order of their coming
        self.kinds: list[str] = []
        self.dtypes: list[str] = []
        self._codes: dict[str, dict[str, int]] = {"name": {}, "kind": {}, "dtype": {}}
        self._name, self._kind, self._dtype = Column(np.int32), Column(np.int32), Column(np.int32)
        self._step, self._rank = Column(np.int64), Column(np.int64)
        self._call, self._seq = Column(np.int64), Column(np.int64)
        self._figures: dict[str, Column] = {}
        self._series: dict[tuple[int, int], list[Whole]] = {}  # kind and name → their rows

    def __len__(self) -> int:
        return self._step.size

    def __repr__(self) -> str:
        return f"<table of {len(self):,} rows, {len(self.names):,} names>"

    def refresh(self) -> bool:
        """Take in what has come since; whether anything has."""
        with self.lock:
            heads = self._feed.fresh()
            if heads is None:
                return False
            self._take(heads)
            if self._again is not None and len(self) > self._limit:
                self._start_afresh(self._again())
            self.version += 1
            return True

    def _start_afresh(self, feed: Feed) -> None:
        """Forget what the source has forgotten: what it holds is taken in again."""
        self._begin(feed)
        heads = feed.fresh()
        if heads is not None:
            self._take(heads)
        self._limit = max(_MOST, 2 * len(self))

    def _take(self, heads: Heads) -> None:
        start = len(self)
        coded = {}
        for column, called in (("name", self.names), ("kind", self.kinds), ("dtype", self.dtypes)):
            codes, words = getattr(heads, column)
            known = self._codes[column]
            places = []
            for word in words:
                if word not in known:
                    known[word] = len(called)
                    called.append(word)
                places.append(known[word])
            coded[column] = np.array(places, np.int32)[codes]
            getattr(self, f"_{column}").extend(coded[column])
        for column in ("step", "rank", "call", "seq"):
            getattr(self, f"_{column}").extend(getattr(heads, column))
        both = coded["kind"].astype(np.int64) << 32 | coded["name"]
        order = np.argsort(both, kind="stable")
        ordered = both[order]
        edges = np.flatnonzero(np.diff(ordered, prepend=-1))
        for first, rows in zip(edges, np.split(order + start, edges[1:]), strict=True):
            key = int(ordered[first])
            self._series.setdefault((key >> 32, key & 0xFFFFFFFF), []).append(rows)

    # -- columns -------------------------------------------------------------------------

    @property
    def name(self) -> NDArray[np.int32]:
        """Of each row, which of `names` it is of."""
        return self._name.values

    @property
    def kind(self) -> NDArray[np.int32]:
        """Of each row, which of `kinds` it is."""
        return self._kind.values

    @property
    def dtype(self) -> NDArray[np.int32]:
        """Of each row, which of `dtypes` its tensor had."""
        return self._dtype.values

    @property
    def step(self) -> Whole:
        return self._step.values

    @property
    def rank(self) -> Whole:
        return self._rank.values

    @property
    def call(self) -> Whole:
        """Of each row, which call of its name within the step it was."""
        return self._call.values

    def statistics(self) -> list[str]:
        """The columns that there are: ``rm2``, ``max_abs`` …, and ``nonfinite``, a count."""
        found = self._feed.statistics()
        return [*found, NONFINITE] if set(_NOT_FINITE) <= set(found) else found

    def column(self, statistic: str) -> Reals:
        """A statistic of every row; NaN where a record has none."""
        if statistic == NONFINITE:
            counts = [np.nan_to_num(self.column(name)) for name in _NOT_FINITE]
            return sum(counts[1:], counts[0])
        with self.lock:
            held = self._figures.get(statistic)
            if held is None:
                there = self.statistics()
                if statistic not in there and statistic != GIVEN:
                    raise NotFound(no_such("statistic", statistic, there))
                held = self._figures[statistic] = Column(np.float64)
            if held.size < len(self):
                held.extend(self._feed.column(statistic, held.size)[: len(self) - held.size])
            return held.values

    def nonfinite(self, rows: Whole) -> Whole:
        """How many values of each of some rows were NaN or infinite; 0 where it is not known."""
        if NONFINITE not in self.statistics():
            return np.zeros(len(rows), np.int64)
        counts = sum(np.nan_to_num(self.column(name)[rows]) for name in _NOT_FINITE)
        return np.asarray(counts).astype(np.int64)

    def given(self, statistic: str, rows: Whole) -> NDArray[np.bool_]:
        """Of which of some rows a statistic is known, be it that it is NaN."""
        value = self.column(statistic)[rows]
        if NONFINITE not in self.statistics():
            return np.ones(len(rows), np.bool_)  # nobody has counted: NaN is all that tells
        found = ~np.isnan(value) | (self.nonfinite(rows) > 0)
        if statistic == VALUE:
            found |= self.column(GIVEN)[rows] > 0
        return np.asarray(found)

    def has(self, statistic: str) -> bool:
        """Whether there is such a column."""
        return statistic in self.statistics()

    # -- rows ----------------------------------------------------------------------------

    def rows(
        self,
        *,
        kind: str,
        names: Sequence[str] | None = None,
        rank: int | None = None,
        step: int | None = None,
    ) -> Whole:
        """The rows of a kind that fit, by name, then step, then the order of capture."""
        found = [self.series(kind, name, rank) for name in self._wanted(kind, names)]
        rows = np.concatenate([np.empty(0, np.int64), *found])
        return rows if step is None else rows[self.step[rows] == step]

    def series(self, kind: str, name: str, rank: int | None = None) -> Whole:
        """The rows of one name and kind by step, then the order of capture."""
        with self.lock:
            key = self._codes["kind"].get(kind, -1), self._codes["name"].get(name, -1)
            parts = self._series.get(key)
            if parts is None:
                return np.empty(0, np.int64)
            if len(parts) > 1:
                self._series[key] = parts = [np.concatenate(parts)]
        rows = parts[0]
        if rank is not None:
            rows = rows[self.rank[rows] == rank]
        order = np.lexsort((self._seq.values[rows], self.rank[rows], self.step[rows]))
        return rows[order]

    def _wanted(self, kind: str, names: Sequence[str] | None) -> Iterable[str]:
        return self.layers(kind) if names is None else names

    def layers(self, kind: str | None = None) -> list[str]:
        """The names of a kind, or all but metrics, in the order in which they first came."""
        with self.lock:
            if kind is None:
                aside = {self._codes["kind"].get(each) for each in _ASIDE}
                codes = sorted({name for which, name in self._series if which not in aside})
            else:
                wanted = self._codes["kind"].get(kind, -1)
                codes = sorted(name for which, name in self._series if which == wanted)
        return [self.names[code] for code in codes]

    def tensor_kinds(self) -> list[str]:
        """The kinds that have statistics of tensors, in a fixed order."""
        return [kind for kind in _KINDS if kind in self._codes["kind"]]

    def ranks(self) -> list[int]:
        """The ranks that there are."""
        return [int(rank) for rank in np.unique(self.rank)]

    def steps(self, kind: str | None = None, name: str | None = None) -> Whole:
        """The steps that there are, of all or of a kind or of a name of it."""
        if kind is not None and name is not None:
            return np.unique(self.step[self.series(kind, name)])
        if kind is None:
            return np.unique(self.step)
        return np.unique(self.step[self.kind == self._codes["kind"].get(kind, -1)])

    def training(self, rank: int | None = None) -> dict[str, tuple[Whole, Reals]]:
        """Training statistics: name → steps and values, those of ``tracker.step(loss=…)``.

        A value a step: that of the rank, or the mean of all ranks that have said one.
        """
        found = {}
        for name in self.layers(Kind.METRIC.value):
            rows = self.series(Kind.METRIC.value, name, rank)
            if not len(rows):
                continue
            step, of = self.step[rows], self.rank[rows]
            last = np.append((np.diff(step) != 0) | (np.diff(of) != 0), True)  # said twice: later
            rows, step = rows[last], step[last]
            starts = np.flatnonzero(np.diff(step, prepend=step[0] - 1))
            counts = np.diff(np.append(starts, len(step)))
            values = np.add.reduceat(self.column(VALUE)[rows], starts) / counts
            found[name] = step[starts], values
        return found

    def alerts(self) -> list[Alert]:
        """The alerts so far, by their steps."""
        return self._feed.alerts()

    def once(self, rows: Whole) -> Whole:
        """Rows without those of activation checkpointing, which computes the same a second time."""
        places = np.stack([self.step[rows], self.rank[rows]])
        if len(rows) < 2 or np.unique(places, axis=1).shape[1] == len(rows):
            return rows
        order = np.argsort(rows, kind="stable")
        again = np.empty(len(rows), np.bool_)
        again[order] = self._feed.recomputed(rows[order])
        return rows[~again]

    def beyond(self, rows: Whole) -> tuple[Whole, Whole]:
        """How many values of rows lie below, and above, the exponents that were counted.

        None of a run or a session, which count all; a LogFrame may have a range.
        """
        return self._feed.beyond(rows)

    def exponents(self, rows: Whole) -> Exponents:
        """The exponent counts of some rows: a column of ``counts`` for each."""
        order = np.argsort(rows, kind="stable")
        found = self._feed.bins(rows[order])
        back = np.empty(len(rows), np.int64)
        back[order] = np.arange(len(rows))
        filled = found.lengths > 0
        first = found.first[filled]
        low = int(first.min()) if len(first) else 0
        high = int((first + found.lengths[filled]).max()) if len(first) else 1
        counts = np.zeros((high - low, len(rows)), np.int64)
        ends = np.cumsum(found.lengths)
        bins = np.arange(len(found.counts)) - np.repeat(ends - found.lengths, found.lengths)
        bins += np.repeat(found.first - low, found.lengths)
        counts[bins, np.repeat(np.arange(len(rows)), found.lengths)] = found.counts
        counts = counts[:, back]
        least = self.column("min_abs")[rows] if self.has("min_abs") else np.zeros(len(rows))
        if self.has("max_abs"):
            most = self.column("max_abs")[rows]
        else:  # the last bin that is filled tells it to a factor of two
            last = len(counts) - 1 - np.argmax(counts[::-1] > 0, axis=0)
            most = np.ldexp(1.0, low + last)
        return Exponents(low, counts, least, most)


def steady(
    draw: Callable[Concatenate[Table, Rest], Drawn],
) -> Callable[Concatenate[Table, Rest], Drawn]:
    """A function of a table during which no other thread refreshes it."""

    @functools.wraps(draw)
    def drawn(table: Table, /, *args: Rest.args, **options: Rest.kwargs) -> Drawn:
        with table.lock:
            return draw(table, *args, **options)

    return drawn


def table_of(source: Any) -> Table:
    """The table of a run, a live session, a tracker, a LogFrame; of a table, itself.

    >>> from tensortap.record import Record
    >>> table = table_of([Record("loss", Kind.METRIC, 3, 0, 0, 0, 1, 0, value=0.5)])
    >>> table.training()
    {'loss': (array([3]), array([0.5]))}
    """
    if isinstance(source, Table):
        return source
    if isinstance(source, (str, Path)):
        source = RunReader(source)
    feed = feed_of(source)
    forgets = isinstance(feed, RecordFeed) and feed.forgets
    return Table(feed, (lambda: feed_of(source)) if forgets else None)


def no_such(what: str, wanted: str, there: Sequence[str]) -> str:
    """What is not there, what may be meant, and what there is.

    >>> no_such("statistic", "rm3", ["rm2", "std"])
    "no statistic is called 'rm3'; did you mean 'rm2'?"
    """
    if not there:
        return f"no {what} is called {wanted!r}: there is none at all"
    near = difflib.get_close_matches(wanted, there, 3, 0.6)
    near = near or [each for each in there if wanted.lower() in each.lower()][:3]
    if near:
        return f"no {what} is called {wanted!r}; did you mean {' or '.join(map(repr, near))}?"
    few = ", ".join(there[:8]) + (f" … ({len(there)} in all)" if len(there) > 8 else "")
    return f"no {what} is called {wanted!r}; there is {few}"
