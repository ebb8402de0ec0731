"""Plan the windows of a run, and write them: here, or with an executor on other machines.

Windows are independent. Each is written into a draft and then renamed; a draft that nobody writes
any more is removed. The parts of the run stay as they are.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tensortap.core.errors import TensortapError
from tensortap.core.files import folder_mode
from tensortap.rooms.compact.rows import Part, write_rows
from tensortap.runs import layout
from tensortap.runs.run_reader import RunReader, is_url, open_remote
from tensortap.runs.tables import NameCounts, PartFile, add_counts
from tensortap.runs.windows import (
    FIRST_STEP,
    FOLDER,
    MANIFEST,
    RECORDS,
    ROW_GROUP,
    WHOLE,
    Manifest,
    chained,
)

# rows of all tensors of a window, and of one: each takes half a kilobyte of disk or of memory
_MOST_ROWS = 1 << 24, 1 << 19
Progress = Callable[[int, int], object]


class WindowJob(msgspec.Struct, frozen=True):
    """All that is needed to write a window; small enough to send to another machine."""

    run: str  # a folder or a URL
    manifest: Manifest  # without what its rows tell
    parts: tuple[Part, ...]


def compact_run(
    reader: RunReader, executor: Executor | None = None, progress: Progress | None = None
) -> int:
    """Write the windows that a run lacks; return how many there were to write.

    While a run grows, only windows are written that all ranks have passed.
    """
    reader.refresh()
    jobs = plan_windows(reader)
    _prepare(reader, bool(jobs))
    run = executor.map if executor is not None else map
    for done, _ in enumerate(run(write_window, jobs), 1):
        if progress is not None:
            progress(done, len(jobs))
    reader.refresh()
    return len(jobs)


def _prepare(reader: RunReader, is_needed: bool) -> None:
    """Make the folder of windows, and remove drafts that nobody writes any more."""
    folder = reader.path / FOLDER
    if is_url(reader.where) or not (is_needed or folder.is_dir()):
        return
    try:
        folder.mkdir(mode=folder_mode(), exist_ok=True)
    except OSError as error:
        raise TensortapError(f"cannot write into {reader.path}: {error.strerror}") from None
    with _locked(folder, wait=True):  # nobody makes a draft meanwhile
        for draft in folder.glob(".*"):
            with contextlib.suppress(OSError), _locked(draft):
                shutil.rmtree(draft)


# -- planning --------------------------------------------------------------------------------


def plan_windows(reader: RunReader) -> list[WindowJob]:
    """Return the windows that are complete and not written yet, by step."""
    parts = {rank: tables.parts for rank, tables in reader.by_rank.items()}
    ends = {rank: max(p.contents.last_step for p in own) for rank, own in parts.items() if own}
    if not ends:
        return []
    has_ended = reader.info.ended is not None
    # the last step of a part may go on in the next one
    end = max(ends.values()) if has_ended else min(ends.values()) - 1
    if not has_ended and len(ends) < len(parts):
        return []
    width = max(1, ROW_GROUP // max(reader.info.world_size, len(parts)))
    if end // width > 100_000:
        raise TensortapError(f"steps up to {end:,} would take more than 100,000 windows")
    known = {window.manifest.first: window.manifest for window in reader.windows}
    sealed = {rank: len(own) for rank, own in parts.items()}
    seqs = {rank: own[-1].contents.last_seq for rank, own in parts.items() if own}
    every = _Sizes([part for own in parts.values() for part in own])
    jobs: list[WindowJob] = []
    done: list[Manifest] = []
    covered, names, missing, before = dict.fromkeys(parts, 0), NameCounts(), 0, ""
    first = FIRST_STEP
    while first <= end:
        begin = max(first, every.next_step(first, end))
        last = max(begin, 0) // width * width + width - 1
        last = min([last, *(f - 1 for f in known if f > first)])
        last = every.last_that_fits(begin, min(last, end) if has_ended else last)
        last = known[first].last if first in known else last
        if last > end and not has_ended:
            break
        manifest = known.get(first) or Manifest(1, first, last, 0, 0, sealed, seqs, {}, {}, {}, 0)
        done.append(manifest)
        count = {rank: _covered(own, rank, done, covered[rank]) for rank, own in parts.items()}
        new = [p.contents for rank, own in parts.items() for p in own[covered[rank] : count[rank]]]
        covered, names = count, add_counts([names, *(each.names for each in new)])
        missing += sum(each.missing for each in new)
        if first not in known:
            manifest = msgspec.structs.replace(
                manifest, covered=covered, names=names, missing=missing, before=before
            )
            inside = tuple(map(_part, every.between(first, last)))
            jobs.append(WindowJob(reader.where, manifest, inside))
        before, first = chained(before, manifest), last + 1
    return jobs


class _Sizes:
    """The steps of parts, and how many records they have."""

    def __init__(self, parts: list[PartFile]) -> None:
        self._parts = parts
        contents = [part.contents for part in parts]
        self._first = np.array([each.first_step for each in contents])
        self._last = np.array([each.last_step for each in contents])
        most = [max((max(kinds.values()) for kinds in each.names.values()), default=0)
                for each in contents]  # fmt: skip
        # of all tensors, and of the largest one
        self._rows = np.array([[each.rows for each in contents], most])

    def between(self, first: int, last: int) -> list[PartFile]:
        """Return the parts that have some of the steps."""
        inside = np.flatnonzero((self._last >= first) & (self._first <= last))
        return [self._parts[i] for i in inside.tolist()]

    def next_step(self, first: int, end: int) -> int:
        """Return the first step of the parts that reach `first`; `end` if there are none."""
        return int(self._first.min(initial=end, where=self._last >= first))

    def last_that_fits(self, first: int, last: int) -> int:
        """Return the last step of a window that is not larger than memory and disk allow."""
        spans = np.maximum(1.0 * self._last - self._first + 1, 1)
        while last > first:
            inside = np.minimum(self._last, last) - np.maximum(self._first, first) + 1
            share = np.maximum(inside, 0) / spans
            if ((self._rows * share).sum(axis=1) <= _MOST_ROWS).all():
                break
            last = first + (last - first) // 2
        return last


def _covered(own: list[PartFile], rank: int, done: list[Manifest], count: int) -> int:
    """Return how many of the first parts of a rank have all rows in windows; `count` or more."""
    while count < len(own):
        low, high = own[count].contents.first_step, own[count].contents.last_step
        touched = [each for each in done if each.first <= high and each.last >= low]
        in_all = all(count < each.parts.get(rank, 0) for each in touched)
        if low < FIRST_STEP or high > done[-1].last or not in_all:
            break
        count += 1
    return count


def _part(part: PartFile) -> Part:
    file = f"records/{layout.rank_name(part.rank)}/{part.path.name}"
    return Part(file, part.rank, part.contents.names)


# -- writing ---------------------------------------------------------------------------------


def write_window(job: WindowJob) -> int:
    """Write a window; return how many records it has."""
    manifest = job.manifest
    name = f"{manifest.first}-{manifest.last}"
    if is_url(job.run):
        return _write_remote(job, name)
    run = Path(job.run)
    draft = run / FOLDER / f".{name}.{secrets.token_hex(4)}"
    with contextlib.ExitStack() as stack:
        with _locked(draft.parent, wait=True):  # nobody removes the draft before it is locked
            draft.mkdir(mode=folder_mode())
            stack.enter_context(_locked(draft))
        rows = _write(job, draft, lambda file: contextlib.nullcontext(run / file))
        _sync(draft)
        try:
            draft.rename(run / FOLDER / name)
        except OSError:  # somebody else was faster
            shutil.rmtree(draft)
    return rows


def _write(job: WindowJob, folder: Path, opened: Callable[[str], Any]) -> int:
    found = write_rows(job.manifest.first, job.manifest.last, job.parts, folder, opened)
    manifest = msgspec.structs.replace(job.manifest, **found)
    layout.write_json(folder / MANIFEST, msgspec.to_builtins(manifest, str_keys=True))
    return manifest.rows


def _write_remote(job: WindowJob, name: str) -> int:
    """Write a window of object storage: the manifest comes last, without it there is no window."""
    files, root = open_remote(job.run)
    with tempfile.TemporaryDirectory(prefix="tensortap-") as temporary:
        folder = Path(temporary)

        @contextlib.contextmanager
        def opened(file: str) -> Iterator[Path]:
            path = folder / "part"
            files.get_file(f"{root}/{file}", str(path))
            yield path
            path.unlink()

        rows = _write(job, folder, opened)
        for file in (RECORDS, WHOLE, MANIFEST):
            files.put_file(str(folder / file), f"{root}/{FOLDER}/{name}/{file}")
    return rows


@contextlib.contextmanager
def _locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a folder; unless it waits, raise OSError if somebody else does."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(fd)


def _sync(folder: Path) -> None:
    """Write all files to the disk before the folder gets its name."""
    for path in (*folder.iterdir(), folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
