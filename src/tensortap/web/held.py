"""Which tensors were kept whole, not only their statistics: by name and kind, at which steps."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from tensortap.formats.columns import numbers
from tensortap.formats.questions import Held
from tensortap.readers.run import RunReader
from tensortap.record import Kind

Steps = dict[tuple[str, str], set[int]]


def held_in_run(reader: RunReader) -> Steps:
    """Of a run: its tables say which values are there."""
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = ["name", "kind", "step", "dtype", "value", "payloads", "tags", "missing", "count"]
    found: Steps = {}
    for table in reader.tables(columns):
        # a value of one byte is None: only statistics. A tensor has a dtype, or lies in a file
        inline = numbers(pc.binary_length(table.column("value"))) > 1
        inline &= numbers(pc.utf8_length(table.column("dtype"))) > 0
        apart = numbers(pc.list_value_length(table.column("payloads"))) > 0
        bare = np.isnan(numbers(table.column("count")))
        here = ~numbers(pc.cast(table.column("missing"), pa.int8())).astype(bool)
        rows = table.take(pa.array(np.flatnonzero((inline | apart | bare) & here)))
        sure = (inline | apart)[(inline | apart | bare) & here].tolist()
        words = (rows.column(name).to_pylist() for name in ("name", "kind", "step", "tags"))
        for name, kind, step, tags, whole in zip(*words, sure, strict=True):
            # what was dumped is a file beside the tables
            if kind != Kind.ALERT.value and (whole or "file" in dict(tags or ())):
                found.setdefault((name, kind), set()).add(step)
    return found


class HeldLive:
    """Of a live session, which is asked for what came since; anew when some made room."""

    def __init__(self, ask: Callable[[int], Held]) -> None:
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
            self._mark = said.mark
            for row in said.rows:
                self._found.setdefault((row.name, row.kind), set()).update(row.steps)
            return {key: set(steps) for key, steps in self._found.items()}
