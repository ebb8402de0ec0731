"""The recorder: one film per name; and the film of one name in a stored run.

Until its first record a `Recorder` is only settings. It can be pickled, so that it can be created
in one process and film in another. The number of films is bounded, because each takes memory until
it is closed.
"""

from __future__ import annotations

import itertools
import logging
import re
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tensortap.core.arguments import check_choice, check_count, check_path, checked
from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.record import Kind, Record
from tensortap.rooms.films.style import Style
from tensortap.rooms.films.video import FORMATS, FilmError, VideoWriter, check_fps
from tensortap.runs.folders import file_name
from tensortap.runs.reader import Reader, find_all
from tensortap.runs.run_reader import RunReader
from tensortap.values.snapshot import borrow

log = logging.getLogger("tensortap")


class Recorder:
    """Films tensors, one film per name: call it with records, then `close` it.

    `mode` is ``auto`` (matrices as images, others as histograms),
    ``image``, ``surface``, ``histogram``, ``pca`` or ``tsne``; `range` is ``follow``
    or a pair. A new file starts after `max_frames`.

    >>> import tempfile, numpy
    >>> from tensortap.core.record import Kind, Record, TensorData
    >>> with Recorder(tempfile.mkdtemp(), size=(160, 120), format="gif") as recorder:
    ...     for step in range(3):
    ...         x = numpy.eye(4, k=step)
    ...         value = TensorData("numpy", "float64", x.shape, x.tobytes())
    ...         recorder(Record("weights", Kind.VALUE, step, 0, step, 0, 1, 0, value=value))
    >>> [path.name for path in recorder.films]
    ['weights-rank0.gif']
    """

    def __init__(
        self,
        folder: str | Path = "videos",
        *,
        size: tuple[int, int] = (640, 480),
        fps: float = 20,
        mode: str = "auto",
        range: str | tuple[float, float] = "follow",  # noqa: A002  the word that people expect
        legend_color: str | Sequence[int] | None = None,
        max_frames: int | None = None,
        format: str = "mp4",  # noqa: A002  the word that people expect
        open_films: int = 64,
    ) -> None:
        check_path("folder", folder)
        check_choice("format", format, FORMATS)
        self.format = format
        self.fps = check_fps(fps)
        if max_frames is not None:
            check_count("max_frames", max_frames)
        check_count("open_films", open_films)
        self.style = Style(size, mode, range, legend_color)
        self.folder = Path(folder).absolute()
        self.max_frames, self.open_films = max_frames, open_films
        self._reset()

    def _reset(self) -> None:
        self.films: list[Path] = []  # every file that was started, in order
        self.dropped: dict[str, int] = {}  # name → frames dropped because of `open_films`
        self._open: dict[object, Film] = {}
        # films are completed even if the program ends without closing them
        self._finalizer = weakref.finalize(self, _close_all, self._open)

    @property
    def needed_memory(self) -> int:
        """Bytes that a worker of `tap.watch` needs for it; t-SNE loads scikit-learn."""
        return (160 if self.style.mode == "tsne" else 96) << 20

    def __getstate__(self) -> dict[str, Any]:
        names = ("folder", "style", "fps", "format", "max_frames", "open_films")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __repr__(self) -> str:
        width, height = self.style.size
        return f"<Recorder {self.folder} {self.format} {width}x{height} {self.style.mode}>"

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, record: Record) -> None:
        """Add a frame to the film of the record's name."""
        if record.kind is Kind.ALERT:
            return
        device = record.tags.get("device", "")
        key = record.name, record.kind, record.rank, device
        film = self._open.get(key)
        if film is None:
            if len(self._open) >= self.open_films:
                self._drop(record.name)
                return
            stem = film_name(record.name, record.kind, record.rank, device)
            film = self._open[key] = Film(self, stem)
        film.draw(record)

    def _drop(self, name: str) -> None:
        if not self.dropped:
            log.warning(
                "tensortap: %r is not filmed, because %d films are open; raise the limit with "
                "open_films=…. recorder.dropped counts the frames of all names without a film",
                name, self.open_films,
            )  # fmt: skip
        self.dropped[name] = self.dropped.get(name, 0) + 1

    def close(self) -> None:
        """Complete all files; further records start new ones."""
        _close_all(self._open, raises=True)


def _close_all(films: dict[object, Film], *, raises: bool = False) -> None:
    """Close all films; log errors, or raise the first of them in the end."""
    errors = []
    while films:
        _, film = films.popitem()
        try:
            film.close()
        except FilmError as error:
            errors.append(error)
            log.error("tensortap: %s", error)
    if errors and raises:
        raise errors[0]


class Film:
    """The film of one name: its painter, and the file that is being written."""

    def __init__(self, recorder: Recorder, stem: str) -> None:
        from tensortap.rooms.films.frames import Painter

        self._recorder = weakref.proxy(recorder)
        self._stem = stem
        self._painter = Painter(recorder.style)
        self._writer: VideoWriter | None = None

    def draw(self, record: Record) -> None:
        frame = self._painter.draw(record)
        most = self._recorder.max_frames
        if self._writer is not None and most is not None and self._writer.frames >= most:
            self.close()
        if self._writer is None:
            self._writer = self._next_file()
        try:
            self._writer.write(frame)
        except FilmError:
            self._writer = None  # the next frame tries a new file
            raise

    def _next_file(self) -> VideoWriter:
        recorder = self._recorder
        folder: Path = recorder.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FilmError(f"cannot create the folder {folder}: {error.strerror}") from None
        for number in itertools.count(1):
            path = folder / f"{self._stem}{'' if number == 1 else f'-{number}'}.{recorder.format}"
            try:
                writer = VideoWriter(path, recorder.format, recorder.style.size, recorder.fps)
            except FileExistsError:
                continue
            recorder.films.append(path)
            return writer
        raise AssertionError("unreachable")

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def film_name(name: str, kind: Kind, rank: int, device: str) -> str:
    """Return the file name of a film, without suffix and number.

    >>> film_name("fc1", Kind.GRADIENT, 1, "cuda:0"), film_name("../x", Kind.VALUE, 0, "")
    ('fc1-gradient-rank1-cuda0', '%2E.%2Fx-rank0')
    """
    words = [file_name(name) or "unnamed"]
    if kind is not Kind.VALUE:
        words.append(kind.value.lower())
    words.append(f"rank{rank}")
    plain = re.sub(r"[^A-Za-z0-9]+", "", device)[:20]
    return "-".join([*words, plain] if plain else words)


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
    from tensortap.rooms.films.frames import Painter

    target = Path(target)
    form = target.suffix.lower().removeprefix(".")
    if form not in FORMATS:
        raise TensortapError(f"{target}: a film is .mp4 or .gif")
    fps = check_fps(fps)
    chosen = Style(**style)
    heads = _records_of(reader, name, rank, kind, *(steps or (None, None)))
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


def _records_of(
    reader: Reader, name: str, rank: int | None, kind: Kind | str | None, *steps: int | None
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
    first, last = (low if steps[0] is None else steps[0]), (high if steps[1] is None else steps[1])
    kept = [record for record in records if first <= record.step <= last]
    if not kept:
        raise NotFound(f"steps: no {name!r} within them; captured steps are {low} to {high}")
    return kept
