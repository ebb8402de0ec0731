"""The film of a name in a run that is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tensortap.errors import NotFound, TensortapError
from tensortap.films.frames import Painter
from tensortap.films.style import Style
from tensortap.films.video import FORMATS, check_fps, create, film_size
from tensortap.frameworks.snapshot import borrow
from tensortap.readers.reader import Reader, find_all
from tensortap.readers.run import RunReader
from tensortap.record import Kind, Record
from tensortap.runs.object_files import load_file

Progress = Callable[[int, int], object]


def film(
    reader: Reader,
    name: str,
    target: str | Path,
    *,
    rank: int | None = None,
    kind: Kind | str | None = None,
    steps: tuple[int | None, int | None] | None = None,
    fps: float = 20,
    format: str | None = None,  # noqa: A002  the word that people expect
    progress: Progress | None = None,
    **style: Any,
) -> int:
    """Make a film of all records of a name, oldest first; how many frames it has.

    Without `rank`, of the lowest one that is there. The format is told by the suffix of
    `target`: ``.mp4``, ``.gif``; PNG frames go into a folder of that name. What a `Recorder`
    may be told of its looks can be said here too.
    """
    target = Path(target)
    form = format or format_of(target)
    if form not in FORMATS:
        raise TensortapError(f"format={form!r}: it is one of {', '.join(FORMATS)}")
    fps = check_fps(fps)
    chosen = Style(**style)
    chosen = dataclasses.replace(chosen, size=film_size(chosen.size, form))
    records = records_of(reader, name, rank=rank, kind=kind, steps=steps)
    if target.exists():  # said before anything is read
        raise TensortapError(f"{target} exists: give the film another name")
    painter = Painter(chosen)
    first = painter.draw(_loaded(reader, records[0]))
    writer = create(target, form, chosen.size, fps, painter.palette())
    try:
        writer.write(first)
        for done, head in enumerate(records[1:], start=1):
            if progress is not None:
                progress(done, len(records))
            writer.write(painter.draw(_loaded(reader, head)))
    finally:
        writer.close()
    if progress is not None:
        progress(len(records), len(records))
    return writer.frames


def _loaded(reader: Reader, head: Record) -> Record:
    """The record with its value, also where that is a file of its own."""
    record = reader.load(head)
    file = record.tags.get("file")
    if file is None or not isinstance(reader, RunReader):
        return record
    value = borrow(load_file(reader.file(file)))
    return msgspec.structs.replace(record, value=value)


def format_of(target: Path) -> str:
    """The format that the suffix of a file means.

    >>> format_of(Path("a.mp4")), format_of(Path("a.gif")), format_of(Path("frames"))
    ('mp4', 'gif', 'png')
    """
    suffix = target.suffix.lower()
    if suffix in (".mp4", ".gif"):
        return suffix[1:]
    if suffix in ("", ".png"):
        return "png"
    raise TensortapError(f"{target}: a film is .mp4 or .gif, or a folder of PNG frames")


def records_of(
    reader: Reader,
    name: str,
    *,
    rank: int | None = None,
    kind: Kind | str | None = None,
    steps: tuple[int | None, int | None] | None = None,
) -> list[Record]:
    """The records of one rank and kind, in the order of their steps; NotFound if none fits."""
    found = find_all(reader, name, rank=rank, kind=kind)
    if rank is None:
        lowest = min(record.rank for record in found)
        found = [record for record in found if record.rank == lowest]
    kinds = sorted({record.kind.value for record in found})
    if len(kinds) > 1:
        raise NotFound(f"{name!r} is there as {' and '.join(kinds)}: say kind={kinds[0]!r}")
    first, last = steps or (None, None)
    kept = [
        record
        for record in found
        if (first is None or record.step >= first) and (last is None or record.step <= last)
    ]
    if not kept:
        there = sorted({record.step for record in found})
        raise NotFound(f"no {name!r} within these steps; there are {there[0]} to {there[-1]}")
    return sorted(kept, key=lambda record: (record.step, record.seq))
