"""`ops`: record every operation of a program, with its line, and find the first bad one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from tensortap.alerts.alert import record_of
from tensortap.capture.pipeline import pipeline
from tensortap.core import ranks
from tensortap.core.record import Kind, Record
from tensortap.rooms.ops.operation_records import NonFiniteOperation, OperationRecords
from tensortap.rooms.ops.operations import Operation
from tensortap.rooms.track.tracked_records import TrackedRecords
from tensortap.values.registry import parts

log = logging.getLogger("tensortap")


class OperationRecorder:
    """Takes the operations that the hooks of a framework observe, while it is attached."""

    def __init__(
        self,
        model: Any,
        send: Callable[[Record], object],
        step: Callable[[], int],
        always: bool = False,
    ) -> None:
        self._always = always  # also while capturing is off; then the caller reports the finding
        self._send = send
        self.remarks: dict[str, str] = {}  # for the user; hooks add to them
        self.found = OperationRecords(send)
        self._step = step
        self._last_step = -1
        self._attached = False
        self._reported: set[str] = set()
        found = (part.operations(model, self) for part in parts("tensortap.rooms.ops"))
        self._hooks: Any = next((hooks for hooks in found if hooks is not None), None)
        if self._hooks is None:
            raise TypeError(f"model must be a torch.nn.Module or None; got {model!r:.100}")

    @property
    def capturing(self) -> bool:
        """Return whether operations are recorded now."""
        return self._attached and (self._always or pipeline.enabled)

    @property
    def step_number(self) -> int:
        return self._step()

    def attach(self, on: bool = True) -> None:
        """Begin to record, or stop."""
        if on is self._attached:
            return
        self._attached = on
        self._hooks.attach() if on else self._hooks.detach()
        self._end_step()
        for name, remark in self.remarks.items():
            if name not in self._reported:
                self._reported.add(name)
                log.warning("tensortap: %s: %s", name, remark)

    def close(self) -> None:
        """Stop, and let go of the model."""
        self.attach(False)
        self._hooks = None

    def operation(self, operation: Operation) -> None:
        """Record an operation that has just run."""
        step = self._step()
        if step != self._last_step:
            self._last_step = step
            self._end_step()
        self.found.add(operation, step)

    def _end_step(self) -> None:
        self.found.end_step()
        finding = self.found.first_nonfinite
        if finding is not None and "why" not in self._reported and not self._always:
            self._reported.add("why")
            world_size = ranks.rank_and_world_size()[1]
            self._send(record_of(
                finding.alert(), seq=pipeline.next_seq(), time_ns=time.time_ns(),
                world_size=world_size,
            ))  # fmt: skip

    def fault(self, name: str, error: Exception) -> object:
        return pipeline.fault(name, error)


class Operations(OperationRecorder):
    """The operations of a program; made by `ops`, used in a ``with`` statement.

    `remarks` has notes, such as that compiled code runs eagerly meanwhile.
    """

    def __init__(self, model: Any) -> None:
        self._kept = TrackedRecords()
        super().__init__(model, lambda record: self._kept.send(record, 0), _current_step)

    def __enter__(self) -> Operations:
        self._kept.begin()
        self.attach()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self._kept.end(pipeline.clock.step or 0)

    @property
    def records(self) -> list[Record]:
        """The records so far, of kind Op, in the order of execution."""
        return [record for record in self._kept if record.kind is Kind.OP]

    @property
    def evicted(self) -> int:
        """Number of records evicted from memory; a run keeps all."""
        return self._kept.memory.evicted

    @property
    def first_nonfinite(self) -> NonFiniteOperation | None:
        """The operation that made the first NaN or infinity: its line, its inputs, and why.

        None if all values are finite. Infinities that the program writes on purpose, such as masks,
        and values that a later operation replaces do not count.
        """
        return self.found.first_nonfinite

    @property
    def nonfinite(self) -> list[NonFiniteOperation]:
        """All operations that made values that are not finite of finite ones, in order."""
        return [origin.finding for origin in self.found.origins]


def _current_step() -> int:
    return pipeline.clock.step or 0


def ops(model: Any = None) -> Operations:
    """Record every operation of a program: ``with tap.ops(model) as ops: … ops.first_nonfinite``.

    Each operation of forward, backward and optimizer becomes a record of kind ``Op``: module,
    operation, line of your program, statistics and digest of its outputs, digests of its inputs.
    They go to the run, the live session, or memory, like all records. Training computes the same
    bits, more slowly, and compiled code runs eagerly meanwhile. For torch only.

    >>> import torch
    >>> model = torch.nn.Linear(2, 2)
    >>> with ops(model) as found:
    ...     loss = torch.log(model(torch.ones(1, 2)) * 0).sum()
    >>> found.first_nonfinite.operation, found.first_nonfinite.why
    ('log', 'log of 0: 2 elements are 0')
    """
    return Operations(model)
