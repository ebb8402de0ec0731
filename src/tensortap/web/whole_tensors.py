"""Which tensors were kept whole, not only their statistics: by name and kind, at which steps."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from tensortap.readers.run import RunReader
from tensortap.record import Kind
from tensortap.runs.arrow import numbers
from tensortap.server.questions import TensorStepsList
from tensortap.table.run_columns import RunColumns, Stretch

Steps = dict[tuple[str, str], set[int]]


class HeldRun:
    """Of a run, whose tables say which values are there; each row is looked at once."""

    def __init__(self, reader: RunReader) -> None:
        self.reader = reader
        self._columns = RunColumns(reader)
        self._found: Steps = {}
        self._lock = threading.Lock()

    def now(self) -> Steps:
        """All that is there, as far as the reader has been refreshed."""
        with self._lock:
            try:
                for stretch in self._columns.fresh():
                    self._take(stretch)
            except BaseException:
                # rows that could not be read are looked at again
                self._columns, self._found = RunColumns(self.reader), {}
                raise
            return {key: set(steps) for key, steps in self._found.items()}

    def _take(self, stretch: Stretch) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        def read(*columns: str) -> pa.Table:
            return next(iter(self._columns.read([stretch], list(columns))))

        few = read("value", "payloads", "count")
        # a value of one byte is None: only statistics
        inline = numbers(pc.binary_length(few.column("value"))) > 1
        apart = numbers(pc.list_value_length(few.column("payloads"))) > 0
        bare = np.isnan(numbers(few.column("count")))
        maybe = np.flatnonzero(inline | apart | bare)
        if not len(maybe):
            return
        asked = ("name", "kind", "step", "dtype", "tags", "missing")
        rows = read(*asked).take(pa.array(maybe))
        words = (rows.column(name).to_pylist() for name in asked)
        flags = inline[maybe].tolist(), apart[maybe].tolist()
        for name, kind, step, dtype, tags, gone, within, beside in zip(*words, *flags, strict=True):
            # a tensor has a dtype, or lies in a file; what was dumped is one beside the tables
            whole = (within and dtype) or beside or "file" in dict(tags or ())
            if whole and not gone and kind != Kind.ALERT.value:
                self._found.setdefault((name, kind), set()).add(step)


class HeldLive:
    """Of a live session, which is asked for what came since; anew when some made room."""

    def __init__(self, ask: Callable[[int], TensorStepsList]) -> None:
        self._ask = ask
        self._found: Steps = {}
        self._mark = 0
        self._since: tuple[float, int] | None = None  # which session, and what it has given up
        self._lock = threading.Lock()

    def now(self) -> Steps:
        """All that is there."""
        with self._lock:
            said = self._ask(self._mark)
            if (said.started, said.evicted) != self._since:
                self._found = {}
                said = self._ask(0) if self._mark else said
                self._since = said.started, said.evicted
            self._mark = said.cursor
            for row in said.rows:
                self._found.setdefault((row.name, row.kind), set()).update(row.steps)
            return {key: set(steps) for key, steps in self._found.items()}
