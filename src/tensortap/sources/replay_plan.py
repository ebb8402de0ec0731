"""Choose the steps to run again in order to reach one of them: the same ones on all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from tensortap.errors import NotFound, TensortapError
from tensortap.frameworks.replaying import StorableTraining
from tensortap.readers.replayable import ReplayableReader, StoredSegment, StoredStep
from tensortap.runs.layout import read_info


class PlannedStep(NamedTuple):
    """A step that is run again, and the part of the run that holds it."""

    segment: StoredSegment
    step: StoredStep


def plan(
    run: Path, training: StorableTraining, step: int
) -> tuple[StoredSegment, list[PlannedStep]]:
    """Return the snapshot to begin with, and the steps up to the one after `step`.

    That one shows the update of `step`. Ranks whose snapshots were taken at different steps begin
    with the oldest of them.
    """
    world_size = read_info(run).world_size
    if world_size != training.world_size:
        raise NotFound(
            f"{run} has {world_size} ranks, and this program {training.world_size}: start as many "
            "processes as the run had"
        )
    reader: ReplayableReader | None = None
    segment: StoredSegment | None = None
    failed: TensortapError | None = None
    try:
        reader = ReplayableReader(run, training.rank)
        segment = reader.find(step)
    except TensortapError as error:
        failed = error
    _check(training, failed)
    assert reader is not None and segment is not None  # noqa: PT018  no error on any rank
    start = min(map(int, training.gather(str(segment.head.step))))
    segments = [segment]
    try:
        segments = reader.chain(segment, start)
    except TensortapError as error:
        failed = error
    _check(training, failed)
    steps = [PlannedStep(each, one) for each in segments for one in each.steps]
    end = next(i for i, each in enumerate(steps) if each.step.number == step) + 1
    if end < len(steps) and not steps[end].step.head.unstored:
        end += 1
    return segments[0], steps[: min(map(int, training.gather(str(end))))]


def _check(training: StorableTraining, failed: TensortapError | None) -> None:
    """Raise the error of this rank, or that of another one: all ranks go on, or none."""
    said = training.gather(json.dumps(None if failed is None else str(failed)))
    if failed is not None:
        raise failed
    for text in map(json.loads, said):
        if text is not None:
            raise TensortapError(text)
