"""The tensors that a run recorded at one step, whole or as this rank has them.

A run of as many ranks as this program has is read rank by rank; one of a single process has whole
tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tensortap.core import ranks
from tensortap.core.errors import NotFound
from tensortap.core.record import Kind, TensorData
from tensortap.rooms.compare.compared_run import ComparedRun, RecordPart
from tensortap.rooms.compare.matching import Choice, choose, renamed
from tensortap.runs.reader import nearest_steps, similar_names

_REPEATED = ("recompute", "backward")  # tags of records that repeat another one


class RecordedStep:
    """The records of one step of a run, under the names of the program, renamed by `renames`."""

    def __init__(
        self, run: ComparedRun, step: int | None = None, renames: Iterable[tuple[str, str]] = ()
    ) -> None:
        self._run = run
        self._renames = tuple(renames)
        self._rank = ranks.rank_and_world_size()[0]
        table = run.table()
        tracked = [kind in (Kind.ACTIVATION, Kind.WEIGHT) for kind in table.kinds]
        steps = table.step[np.array(tracked, np.bool_)[table.kind]] if len(table) else table.step
        trained = steps[steps >= 0]  # without initial weights
        if not len(trained):
            raise NotFound(f"{run.title} has no step of a tracked model: record it with tap.track")
        self.step = int(trained.min()) if step is None else step
        if self.step not in steps:
            near = nearest_steps(self.step, set(map(int, np.unique(trained))))
            raise NotFound(f"{run.title} has no step {self.step}; {near}")
        chosen = choose(table, Choice(steps=(self.step, self.step)), rename=False)
        self.world_size = len(table.ranks())
        self._parts: dict[tuple[str, str, int], list[RecordPart]] = {}
        self.modes: set[str] = set()  # in which modules ran: "" for training
        for part in chosen.parts(chosen.rows):
            record = part.record
            if not any(tag in record.tags for tag in _REPEATED):
                self._parts.setdefault((record.name, record.kind, record.call), []).append(part)
                if record.kind is Kind.ACTIVATION:
                    self.modes.add(record.tags.get("mode", ""))
        self.has_inputs = any(".input[" in name for name, kind, _ in self._parts)

    def spelled(self, name: str) -> str:
        """Return a name of the program as the run spells it."""
        return renamed(name, self._renames)

    def calls(self, module: str) -> int:
        """Return how many calls of a module have a recorded output."""
        name = self.spelled(module)
        return len({
            call for (each, kind, call), parts in self._parts.items()
            if kind is Kind.ACTIVATION
            and (each == name or parts[0].record.tags.get("module") == name)
            and "input" not in parts[0].record.tags
        })  # fmt: skip

    def names(self, kind: Kind = Kind.ACTIVATION) -> list[str]:
        """Return the recorded names of a kind, without those of inputs."""
        return list(dict.fromkeys(
            name for (name, each, _), parts in self._parts.items()
            if each is kind and "input" not in parts[0].record.tags
        ))  # fmt: skip

    def states(self, parameter: str) -> list[str]:
        """Return which tensors of the optimizer's state are recorded for a parameter."""
        name = self.spelled(parameter)
        tags = (parts[0].record.tags for (_, kind, _), parts in self._parts.items()
                if kind is Kind.OPTIMISER_STATE)  # fmt: skip
        return [each["state"] for each in tags if each.get("parameter") == name]

    def has(self, name: str, kind: Kind, call: int = 0) -> bool:
        """Return whether there is a record, with its value or without."""
        return (self.spelled(name), kind, call) in self._parts

    def get(self, name: str, kind: Kind, call: int = 0) -> TensorData:
        """Return a tensor of the run; raise NotFound, with the reason, if it has none."""
        name = self.spelled(name)
        parts = self._parts.get((name, kind, call))
        if parts is None:
            raise NotFound(self._why_not(name, kind, call))
        if not all(part.has_value for part in parts):
            raise NotFound(
                f"only statistics of {name!r} ({kind.value}) were kept; record the run with "
                "tap.track(..., tensors=True)"
            )
        found = next((part for part in parts if part.record.rank == self._rank), parts[0])
        value = self._run.value(found)
        if isinstance(value, TensorData):
            return value
        array = np.asarray(value)
        return TensorData("numpy", found.record.dtype, array.shape, array.tobytes())

    def _why_not(self, name: str, kind: Kind, call: int) -> str:
        calls = sum((each, of) == (name, kind) for each, of, _ in self._parts)
        if calls:
            return (
                f"the run has {calls} call{'s' if calls > 1 else ''} of {name!r} at step "
                f"{self.step}, this is call {call + 1}"
            )
        near = similar_names(name, self.names(kind) or self.names())
        return f"the run has no {kind.value} of {name!r} at step {self.step}; {near}"
