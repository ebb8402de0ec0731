"""Read the snapshots and steps that a black box has kept in a run; nothing in them is trusted."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from tensortap.errors import NotFound
from tensortap.files import CorruptFile, contained, plain
from tensortap.record import Value
from tensortap.runs.journal import Frame, JournalReader
from tensortap.runs.payloads import TensorReader
from tensortap.runs.replayable import (
    BYTES,
    END,
    HEAD,
    STEP,
    VERSION,
    SegmentHead,
    StepHead,
    box_folder,
)
from tensortap.runs.rows import decode_value
from tensortap.stats.digest import digest
from tensortap.values import tensors

_JOURNAL = re.compile(r"(\d{6,})\.steps")
_LARGEST = 1 << 30  # bytes of a frame that is not a tensor

_Head = TypeVar("_Head", SegmentHead, StepHead)


class StoredStep(NamedTuple):
    """A step of a journal; `result` is the digest of what it returned, None if it did not end."""

    number: int
    head: StepHead
    result: bytes | None


class StoredSegment:
    """A snapshot and the steps after it."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._journal = JournalReader(contained(folder, name))
        first = self._journal.frame_at(0)
        if first is None or first.kind != HEAD:
            raise CorruptFile(f"{self._journal.path} is damaged: it has no snapshot")
        self.head = self._read(first, SegmentHead)
        if self.head.format > VERSION:
            raise CorruptFile(
                f"{self._journal.path} has format {self.head.format}, but this tensortap reads "
                f"only up to {VERSION}: upgrade tensortap"
            )
        self._tensors: list[Frame] = []
        self._steps: list[StoredStep] | None = None

    def _read(self, frame: Frame, kind: type[_Head]) -> _Head:
        if frame.nbytes > _LARGEST:
            raise CorruptFile(f"{self._journal.path} is damaged at byte {frame.start:,}")
        try:
            return msgspec.msgpack.decode(self._journal.read(frame), type=kind)
        except msgspec.MsgspecError as error:
            raise CorruptFile(f"{self._journal.path} is damaged: {plain(str(error))}") from None

    @property
    def steps(self) -> list[StoredStep]:
        """The steps, in order; those after damage are left out."""
        if self._steps is None:
            found: list[StoredStep] = []
            for frame in self._journal.frames():
                if frame.kind == BYTES:
                    self._tensors.append(frame)
                elif frame.kind == STEP:
                    try:
                        head = self._read(frame, StepHead)
                    except CorruptFile:
                        break
                    found.append(StoredStep(head.number, head, None))
                elif frame.kind == END and found and frame.nbytes <= _LARGEST:
                    found[-1] = found[-1]._replace(result=self._journal.read(frame))
            self._steps = found
        return self._steps

    def snapshot(self) -> Value:
        """Return the snapshot; raise CorruptFile unless every tensor has its digest."""
        files: dict[str, TensorReader] = {}
        views = []
        for file, key in self.head.payloads:
            if file not in files:
                files[file] = TensorReader(contained(self._folder, file))
            views.append(files[file].payload(key).view)
        value = decode_value(self.head.value, views)
        large = [each for each in tensors(value) if not isinstance(each.data, bytes)]
        by_view = {id(view): key for view, (_, key) in zip(views, self.head.payloads, strict=True)}
        for tensor in large:
            if digest(tensor).hex() != by_view.get(id(tensor.data)):
                raise CorruptFile(
                    f"{self._folder}: a {plain(tensor.dtype)} tensor of the snapshot of step "
                    f"{self.head.step} is damaged: its digest differs from the stored one"
                )
        return value

    def value(self, step: StoredStep) -> Value:
        """Return what is needed to run a step again."""
        if step.head.unstored:
            why = plain(step.head.unstored)
            raise NotFound(f"the batch of step {step.number} is not in the run: {why}")
        views = []
        for index in step.head.tensors:
            if not 0 <= index < len(self._tensors):
                raise CorruptFile(f"{self._journal.path} is damaged: a tensor is missing")
            views.append(memoryview(self._journal.read(self._tensors[index])))
        return decode_value(step.head.value, views)


class ReplayableReader:
    """The snapshots and steps of one rank of a run."""

    def __init__(self, run: Path, rank: int) -> None:
        self._run = run
        self._rank = rank
        self._folder = box_folder(run, rank)
        contained(run, self._folder.relative_to(run))
        if not self._folder.is_dir():
            raise NotFound(
                f"{run} has no snapshots of rank {rank}: tap.init(…, blackbox=True) and "
                "tap.blackbox(…) write them"
            )
        found = (_JOURNAL.fullmatch(path.name) for path in self._folder.iterdir())
        self._names = {int(match[1]): match[0] for match in found if match is not None}

    def segments(self) -> Iterator[StoredSegment]:
        """Yield the snapshots that can be read, the newest first."""
        for number in sorted(self._names, reverse=True):
            try:
                yield StoredSegment(self._folder, self._names[number])
            except (CorruptFile, FileNotFoundError):
                continue  # one that is damaged, or has just been evicted

    def find(self, step: int) -> StoredSegment:
        """Return the last snapshot from which a step can be reached."""
        for number in sorted(self._names, reverse=True):
            try:
                segment = StoredSegment(self._folder, self._names[number])
            except FileNotFoundError:
                continue  # just evicted
            if segment.head.step <= step and any(s.number == step for s in segment.steps):
                return segment
        where = f"{self._run} cannot be replayed{f' on rank {self._rank}' if self._rank else ''}"
        raise NotFound(f"step {step} of {where}: {self.extent()}")

    def chain(self, last: StoredSegment, start: int) -> list[StoredSegment]:
        """Return the snapshots from that of step `start` up to a later one, without a gap."""
        found = [last]
        for segment in self.segments():
            if found[0].head.step == start:
                return found
            ended = bool(segment.steps) and segment.steps[-1].result is not None
            if ended and segment.steps[-1].number == found[0].head.step - 1:
                found.insert(0, segment)
        if found[0].head.step == start:
            return found
        raise NotFound(f"no snapshot of step {start} leads to step {last.head.step} in {self._run}")

    def ranges(self) -> list[tuple[int, int]]:
        """Return the first and last steps that can be replayed without a gap between them."""
        found: list[tuple[int, int]] = []
        for segment in reversed(list(self.segments())):
            for step in itertools.takewhile(lambda each: not each.head.unstored, segment.steps):
                if found and found[-1][0] <= step.number <= found[-1][1] + 1:
                    found[-1] = found[-1][0], max(step.number, found[-1][1])
                else:
                    found.append((step.number, step.number))
        return found

    def extent(self) -> str:
        """Return in words which steps can be replayed, and how many snapshots were evicted."""
        spans = [f"{a} to {b}" if a != b else str(a) for a, b in self.ranges()]
        text = f"the run can replay steps {', '.join(spans)}" if spans else "the run has no steps"
        evicted = min(self._names, default=0)
        if evicted:
            text += f"; {evicted} older snapshot{'s were' if evicted > 1 else ' was'} evicted"
        return text
