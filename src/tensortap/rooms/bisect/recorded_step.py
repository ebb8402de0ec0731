"""The tensors that a run recorded at one step, whole or as this rank has them.

A run of as many ranks as this program has is read rank by rank. From any other run come whole
tensors, assembled from shards; what the ranks recorded of their own batches is joined along the
first dimension, in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from tensortap.core import ranks
from tensortap.core.errors import NotFound
from tensortap.core.record import Kind, TensorData
from tensortap.rooms.compare.compared_run import ComparedRun, RecordPart, batch_of, whole
from tensortap.rooms.compare.matching import Choice, choose, renamed
from tensortap.runs.assemble import Disagreement
from tensortap.runs.reader import nearest_steps, similar_names
from tensortap.values.view import as_numpy

_REPEATED = ("recompute", "backward")  # tags of records that repeat another one


class RecordedTensor(NamedTuple):
    """A tensor of the run, and how it was put together; `split` if from several batches."""

    data: TensorData
    note: str = ""
    split: bool = False


class RecordedStep:
    """The records of one step of a run, under the names of the program, renamed by `renames`."""

    def __init__(
        self, run: ComparedRun, step: int | None = None, renames: Iterable[tuple[str, str]] = ()
    ) -> None:
        self._run = run
        self._renames = tuple(renames)
        self._rank, self._world_size = ranks.rank_and_world_size()
        table = run.table()
        tracked = [kind in (Kind.ACTIVATION, Kind.WEIGHT) for kind in table.kinds]
        steps = table.step[np.array(tracked, np.bool_)[table.kind]] if len(table) else table.step
        steps = steps[steps >= 0]  # without initial weights
        if not len(steps):
            raise NotFound(f"{run.title} has no step of a tracked model: record it with tap.track")
        self.first = int(steps.min())
        self.step = self.first if step is None else step
        if self.step not in steps:
            near = nearest_steps(self.step, set(map(int, np.unique(steps))))
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

    def get(
        self, name: str, kind: Kind, call: int = 0, shape: tuple[int, ...] | None = None
    ) -> RecordedTensor:
        """Return a tensor of the run; raise NotFound, with the reason, if it has none.

        `shape` is that of the whole tensor in this program, if it is known.
        """
        name = self.spelled(name)
        parts = self._parts.get((name, kind, call))
        if parts is None:
            raise NotFound(self._why_not(name, kind, call))
        if not all(part.has_value for part in parts):
            raise NotFound(
                f"only statistics of {name!r} ({kind.value}) were kept; record the run with "
                "tap.track(..., tensors=True)"
            )
        own = [part for part in parts if part.record.rank == self._rank]
        if own and self.world_size == self._world_size:
            return RecordedTensor(self._tensor(own[:1], local=True))
        try:
            return self._whole(parts, shape)
        except Disagreement as error:
            raise NotFound(f"{name!r} ({kind.value}) cannot be put together: {error}") from None

    def _whole(self, parts: list[RecordPart], shape: tuple[int, ...] | None) -> RecordedTensor:
        placements = {part.record.tags.get("placements", "") for part in parts}
        if any("P" in each for each in placements):
            raise Disagreement("the ranks recorded partial sums")
        if "?" in placements and any(part.record.shape != shape for part in parts):
            raise Disagreement("its layout on the ranks is unknown")
        batches: dict[Any, list[RecordPart]] = {}
        for part in parts:
            batches.setdefault(batch_of(part.record), []).append(part)
        tensors = [self._tensor(each) for each in batches.values()]
        first = tensors[0]
        if len(tensors) == 1:
            note = f"put together from {len(parts)} ranks" if len(parts) > 1 else ""
            return RecordedTensor(first, note)
        arrays = [as_numpy(each) for each in tensors]
        same = first.shape == shape and all(
            array.tobytes() == arrays[0].tobytes() for array in arrays
        )
        if same:
            return RecordedTensor(first, f"the same on {len(tensors)} ranks")
        if not first.shape:
            raise Disagreement("each rank has one of its own")
        joined = np.concatenate(arrays)
        data = TensorData(first.framework, first.dtype, joined.shape, joined.tobytes())
        return RecordedTensor(data, f"the batches of {len(tensors)} ranks, in their order", True)

    def _tensor(self, parts: list[RecordPart], local: bool = False) -> TensorData:
        first = parts[0].record
        value = self._run.value(parts[0]) if local else whole(self._run, parts)
        if isinstance(value, TensorData):
            return value
        array = np.asarray(value)
        return TensorData("numpy", first.dtype, array.shape, array.tobytes())

    def _why_not(self, name: str, kind: Kind, call: int) -> str:
        calls = sum((each, of) == (name, kind) for each, of, _ in self._parts)
        if calls:
            return (
                f"the run has {calls} call{'s' if calls > 1 else ''} of {name!r} at step "
                f"{self.step}, this is call {call + 1}"
            )
        near = similar_names(name, self.names(kind) or self.names())
        return f"the run has no {kind.value} of {name!r} at step {self.step}; {near}"
