"""Which tensors were kept whole, not only their statistics: by name and kind, at which steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tensortap.record import Kind
from tensortap.runs.arrow import numbers
from tensortap.server.questions import TensorStepsList
from tensortap.table.table import Table, has_tag

if TYPE_CHECKING:
    import pyarrow as pa

Steps = dict[tuple[str, str], set[int]]


class HeldRun:
    """Of a run, whose table says which values are there; each row is looked at once."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._found: Steps = {}
        self._looked = 0  # rows
        self._lock = threading.Lock()

    def now(self) -> Steps:
        """All that is there, as far as the table has been refreshed."""
        with self._lock, self.table.lock:
            for cells in self.table.read(["value", "payloads", "tags"], self._looked):
                self._take(cells)
                self._looked += cells.num_rows
            return {key: set(steps) for key, steps in self._found.items()}

    def _take(self, cells: pa.Table) -> None:
        import pyarrow.compute as pc

        # a value of one byte is None: only statistics
        inline = numbers(pc.binary_length(cells.column("value"))) > 1
        apart = numbers(pc.list_value_length(cells.column("payloads"))) > 0
        table = self.table
        rows = self._looked + np.arange(cells.num_rows)
        is_tensor = np.array([bool(dtype) for dtype in table.dtypes], np.bool_)
        # a tensor has a dtype, or lies in a file; what was dumped is one beside the tables
        whole = (inline & is_tensor[table.dtype[rows]]) | apart | has_tag(cells, "file")
        for row in rows[whole].tolist():
            name, kind = table.names[table.name[row]], table.kinds[table.kind[row]]
            if kind != Kind.ALERT.value:
                self._found.setdefault((name, kind), set()).add(int(table.step[row]))


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
