"""A film of one name in a stored run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tensortap.core.arguments import checked
from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.record import Kind, Record
from tensortap.rooms.films.frames import Painter
from tensortap.rooms.films.style import Style
from tensortap.rooms.films.video import FORMATS, VideoWriter, check_fps
from tensortap.runs.reader import Reader, find_all
from tensortap.runs.run_reader import RunReader
from tensortap.values.snapshot import borrow

Progress = Callable[[int, int], object]


@checked
def film(
    reader: Reader,
    name: str,
    target: str | Path,
    *,
    rank: int | None = None,
    kind: Kind | str | None = None,
    steps: tuple[int | None, int | None] | None = None,
    fps: float = 20,
    progress: Progress | None = None,
    **style: Any,
) -> int:
    """Make a film of all records of a name, oldest first; return the number of frames.

    `rank` is by default the lowest one. The suffix of `target` gives the format: ``.mp4`` or
    ``.gif``. `style` is as for a `Recorder`.
    """
    target = Path(target)
    form = target.suffix.lower().removeprefix(".")
    if form not in FORMATS:
        raise TensortapError(f"{target}: a film is .mp4 or .gif")
    fps = check_fps(fps)
    chosen = Style(**style)
    heads = records_of(reader, name, rank=rank, kind=kind, steps=steps)
    if target.exists():
        raise TensortapError(f"{target} already exists; choose another name")
    painter = Painter(chosen)
    writer = VideoWriter(target, form, chosen.size, fps)
    try:
        for done, head in enumerate(heads, start=1):
            writer.write(painter.draw(_load(reader, head)))
            if progress is not None:
                progress(done, len(heads))
    finally:
        writer.close()
    return len(heads)


def _load(reader: Reader, head: Record) -> Record:
    """Return a record with its value, even if that is a file of its own."""
    record = reader.load(head)
    file = record.tags.get("file")
    if file is None or not isinstance(reader, RunReader):
        return record
    return msgspec.structs.replace(record, value=borrow(reader.load_file(file)))


def records_of(
    reader: Reader,
    name: str,
    *,
    rank: int | None = None,
    kind: Kind | str | None = None,
    steps: tuple[int | None, int | None] | None = None,
) -> list[Record]:
    """Return the records of one rank and kind by steps; raise NotFound if none fits."""
    records = find_all(reader, name, rank=rank, kind=kind)
    if rank is None:
        lowest = min(record.rank for record in records)
        records = [record for record in records if record.rank == lowest]
    kinds = sorted({record.kind.value for record in records})
    if len(kinds) > 1:
        raise NotFound(f"{name!r} exists as {' and '.join(kinds)}; pass kind={kinds[0]!r}")
    records = sorted(records, key=lambda record: (record.step, record.seq))
    low, high = records[0].step, records[-1].step
    first, last = steps or (None, None)
    kept = [record for record in records if first is None or record.step >= first]
    kept = [record for record in kept if last is None or record.step <= last]
    if not kept:
        raise NotFound(f"steps: no {name!r} within them; captured steps are {low} to {high}")
    return kept
