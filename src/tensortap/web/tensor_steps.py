"""Which tensors were kept whole, not only their statistics: by name and kind, at which steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tensortap.record import Kind
from tensortap.runs.arrow import numbers
from tensortap.runs.rows import NO_VALUE
from tensortap.server.questions import TensorStepsList
from tensortap.table.table import Table, has_tag

if TYPE_CHECKING:
    import pyarrow as pa

StepsOfTensors = dict[tuple[str, str], set[int]]


class RunTensorSteps:
    """The tensors of a run; each row of its table is examined once."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._steps: StepsOfTensors = {}
        self._examined = 0  # rows
        self._lock = threading.Lock()

    def current(self) -> StepsOfTensors:
        """Return name and kind → steps, for all rows that the table has read."""
        with self._lock, self.table.lock:
            for cells in self.table.read(["value", "payloads", "tags"], self._examined):
                self._examine(cells)
                self._examined += cells.num_rows
            return {key: set(steps) for key, steps in self._steps.items()}

    def _examine(self, cells: pa.Table) -> None:
        import pyarrow.compute as pc

        table = self.table
        rows = self._examined + np.arange(cells.num_rows)
        has_value = numbers(pc.binary_length(cells.column("value"))) > len(NO_VALUE)
        has_payload = numbers(pc.list_value_length(cells.column("payloads"))) > 0
        has_dtype = np.array([bool(dtype) for dtype in table.dtypes], np.bool_)[table.dtype[rows]]
        is_tensor = (has_value & has_dtype) | has_payload | has_tag(cells, "file")
        for row in rows[is_tensor].tolist():
            name, kind = table.names[table.name[row]], table.kinds[table.kind[row]]
            if kind != Kind.ALERT.value:
                self._steps.setdefault((name, kind), set()).add(int(table.step[row]))


class SessionTensorSteps:
    """The tensors of a live session, which reports new ones; asked anew after evictions."""

    def __init__(self, ask: Callable[[int], TensorStepsList]) -> None:
        self._ask = ask
        self._steps: StepsOfTensors = {}
        self._cursor = 0
        self._valid_for: tuple[float, int] | None = None  # start of the session, evicted records
        self._lock = threading.Lock()

    def current(self) -> StepsOfTensors:
        """Return name and kind → steps."""
        with self._lock:
            answer = self._ask(self._cursor)
            if (answer.started, answer.evicted) != self._valid_for:
                self._steps = {}
                answer = self._ask(0) if self._cursor else answer
                self._valid_for = answer.started, answer.evicted
            self._cursor = answer.cursor
            for row in answer.rows:
                self._steps.setdefault((row.name, row.kind), set()).update(row.steps)
            return {key: set(steps) for key, steps in self._steps.items()}
