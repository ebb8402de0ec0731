"""Films on disk: H.264 in MP4, GIF, and single PNG frames, written frame by frame.

A film that is being written is a fragmented MP4 in which every frame is a fragment: whatever
happens to the program, what is on disk plays up to there. When it is closed it gets the index of
a plain MP4, with which players know its length at once. The file is opened by us and never
replaces another; PyAV only fills it.
"""

from __future__ import annotations

import contextlib
import fractions
import io
import numbers
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tensortap.errors import MissingExtra, TensortapError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMATS = ("mp4", "gif", "png")
_FASTEST = 240.0
_KEY_SECONDS = 2.0  # between frames that can be jumped to
_INDEX_AT_END = (61, 7)  # libavformat that turns fragments into a plain MP4 at the end
# One thread a film: the processors belong to training, and to other films. Frames leave at once.
_ENCODER = {"preset": "veryfast", "tune": "zerolatency", "crf": "20"}


class FilmError(TensortapError):
    """A film that cannot be written, and why."""


class Writer(Protocol):
    """Takes frames of red, green, blue and 255, and makes a film of them."""

    path: Path
    frames: int

    def write(self, frame: NDArray[np.uint8]) -> None:
        """Add a frame."""
        ...

    def close(self) -> None:
        """Finish the file; it is complete afterwards. Once more does nothing."""
        ...


def need_av() -> Any:
    """PyAV, or what to install."""
    try:
        import av
    except ImportError:
        raise MissingExtra("films need PyAV: pip install 'tensortap[video]'") from None
    return av


def check_fps(fps: Any) -> float:
    """Frames a second, or why that cannot be.

    >>> check_fps(20)
    20.0
    """
    if not isinstance(fps, numbers.Real) or not 0 < float(fps) <= _FASTEST:
        raise TensortapError(
            f"fps={fps!r}: frames a second, more than 0 and at most {_FASTEST:.0f}"
        )
    return float(fps)


def film_size(size: tuple[int, int], form: str) -> tuple[int, int]:
    """The size of the frames of a film: H.264 in its common form has even sides only.

    >>> film_size((641, 479), "mp4"), film_size((641, 479), "gif")
    ((642, 480), (641, 479))
    """
    width, height = size
    return (width + width % 2, height + height % 2) if form == "mp4" else (width, height)


def create(
    path: Path,
    form: str,
    size: tuple[int, int],
    fps: float,
    palette: NDArray[np.uint8] | None = None,
) -> Writer:
    """Begin a film; FileExistsError if something is there already."""
    if form == "png":
        return _Pictures(path)
    return _Mp4(path, size, fps) if form == "mp4" else _Gif(path, size, fps, palette)


class _File(io.RawIOBase):
    """The file of a film, as PyAV needs it; what went wrong is kept, since PyAV only says that.

    It belongs to the process that opened it: a forked child that lets go of its copy of a film
    must not finish the film of its parent. So the place to write at is kept here, not in the
    descriptor, which both share.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            raise
        except OSError as error:
            raise FilmError(f"cannot write the film {path}: {error.strerror}") from None
        self.error: OSError | None = None
        self.name = str(path)
        self._at, self._owner = 0, os.getpid()

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if os.getpid() != self._owner:
            return len(view)
        done = 0
        try:
            while done < len(view):
                done += os.pwrite(self._fd, view[done:], self._at + done)
        except OSError as error:
            self.error = error
            raise
        self._at += done
        return done

    def read(self, size: int = -1) -> bytes:
        data = os.pread(self._fd, size if size >= 0 else os.fstat(self._fd).st_size, self._at)
        self._at += len(data)
        return data

    def seek(self, place: int, whence: int = 0) -> int:
        base = (0, self._at, os.fstat(self._fd).st_size if whence == 2 else 0)[whence]
        self._at = base + place
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def cut(self, size: int) -> None:
        """Leave only so many bytes."""
        if os.getpid() == self._owner:
            with contextlib.suppress(OSError):  # then a torn frame ends it, which players skip
                os.ftruncate(self._fd, size)

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()


class _Encoded:
    """A container with one stream of video."""

    def __init__(self, path: Path, form: str, options: dict[str, str]) -> None:
        av = need_av()
        self.path = path
        self.frames = 0
        self._file = _File(path)
        self._open = True
        self._whole = 0  # bytes up to the end of the last frame that is complete
        try:
            self._container = av.open(self._file, "w", format=form, options=options)
        except BaseException:
            self._file.close()
            raise

    def _put(self, stream: Any, frame: Any) -> None:
        if not self._open:
            raise FilmError(f"the film {self.path} has been closed")
        try:
            self._mux(stream.encode(frame))
        except Exception as error:
            self._give_up()
            raise self._said(error) from error
        self.frames += 1
        self._whole = self._file.tell()

    _duration = 1

    def _mux(self, packets: list[Any]) -> None:
        for packet in packets:
            # an older PyAV has no setter: then players guess how long the last frame is shown
            with contextlib.suppress(AttributeError):
                packet.duration = self._duration
            self._container.mux(packet)

    def _said(self, error: Exception) -> FilmError:
        reason = self._file.error or error
        why = getattr(reason, "strerror", None) or str(reason)
        return FilmError(
            f"the film {self.path} ends after {self.frames} frames, it cannot be written: {why}"
        )

    def _give_up(self) -> None:
        """What is whole on disk stays: it plays up to there."""
        self._open = False
        with contextlib.suppress(Exception):  # it would say the same again
            self._container.close()
        self._file.cut(self._whole)
        self._file.close()

    def _finish(self, stream: Any) -> None:
        if not self._open:
            return
        try:
            self._mux(stream.encode(None))
            self._container.close()
        except Exception as error:
            self._give_up()
            raise self._said(error) from error
        self._open = False
        self._file.close()


class _Mp4(_Encoded):
    """H.264, as browsers play it."""

    def __init__(self, path: Path, size: tuple[int, int], fps: float) -> None:
        av = need_av()
        flags = "frag_every_frame+empty_moov+default_base_moof"
        if tuple(av.library_versions["libavformat"][:2]) >= _INDEX_AT_END:
            flags += "+hybrid_fragmented"
        super().__init__(path, "mp4", {"movflags": flags})
        rate = fractions.Fraction(fps).limit_denominator(1001)
        try:
            stream = self._container.add_stream("libx264", rate=rate)
        except Exception as error:
            self._give_up()
            path.unlink(missing_ok=True)
            raise FilmError(
                f"this PyAV has no H.264 encoder (libx264): format='gif' or 'png' ({error})"
            ) from error
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.options = {**_ENCODER, "g": str(max(1, round(fps * _KEY_SECONDS)))}
        stream.codec_context.thread_count = 1
        stream.time_base = stream.codec_context.time_base = 1 / rate
        self._stream, self._time_base = stream, 1 / rate

    def write(self, frame: NDArray[np.uint8]) -> None:
        """Add a frame; those before it are on disk when this returns."""
        import av

        picture = av.VideoFrame.from_ndarray(frame, "rgba").reformat(format="yuv420p")
        picture.pts, picture.time_base = self.frames, self._time_base
        self._put(self._stream, picture)

    def close(self) -> None:
        """Finish the file with its index."""
        self._finish(self._stream)


class _Gif(_Encoded):
    """One palette for the whole film, so that nothing flickers."""

    def __init__(
        self, path: Path, size: tuple[int, int], fps: float, palette: NDArray[np.uint8] | None
    ) -> None:
        super().__init__(path, "gif", {"loop": "0"})
        self._size, self._fps, self._hint = size, min(fps, 50.0), palette
        self._stream: Any = None
        self._palette: Any = None

    def _begin(self, frame: NDArray[np.uint8]) -> None:
        import numpy as np
        from PIL import Image

        stream = self._container.add_stream("gif", rate=fractions.Fraction(100))
        stream.width, stream.height = self._size
        stream.pix_fmt = "pal8"
        stream.time_base = stream.codec_context.time_base = fractions.Fraction(1, 100)
        self._stream = stream
        # the first frame, and as much again of the colours that later ones may have
        picture = np.ascontiguousarray(frame[..., :3])
        if self._hint is not None:
            wide = picture.shape[1]
            rows = -(-picture.shape[0] // 2)
            more = np.resize(np.repeat(self._hint, 4, axis=0), (rows, wide, 3))
            picture = np.concatenate([picture, more])
        # 255: one entry is left for what has not changed since the frame before
        self._palette = Image.fromarray(picture).quantize(
            255, method=Image.Quantize.MEDIANCUT, kmeans=1, dither=Image.Dither.NONE
        )

    def write(self, frame: NDArray[np.uint8]) -> None:
        """Add a frame."""
        import av
        import numpy as np
        from PIL import Image

        if self._stream is None:
            self._begin(frame)
        image = Image.fromarray(np.ascontiguousarray(frame[..., :3]))
        found = image.quantize(palette=self._palette, dither=Image.Dither.NONE)
        colors = np.zeros((256, 4), np.uint8)
        listed = np.array(self._palette.getpalette(), np.uint8).reshape(-1, 3)[:255]
        colors[: len(listed), 1:] = listed
        colors[: len(listed), 0] = 255
        picture = av.VideoFrame.from_ndarray((np.asarray(found), colors), "pal8")
        picture.pts = round(self.frames * 100 / self._fps)
        picture.time_base = fractions.Fraction(1, 100)
        self._duration = round((self.frames + 1) * 100 / self._fps) - picture.pts
        self._put(self._stream, picture)

    def close(self) -> None:
        """Finish the file."""
        if self._stream is not None:
            self._finish(self._stream)
        elif self._open:
            self._give_up()


class _Pictures:
    """A folder of PNG frames."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.frames = 0
        try:
            path.mkdir()
        except FileExistsError:
            raise
        except OSError as error:
            raise FilmError(f"cannot make the folder {path}: {error.strerror}") from None

    def write(self, frame: NDArray[np.uint8]) -> None:
        """Add a frame as a file of its own."""
        import numpy as np
        from PIL import Image

        target = self.path / f"{self.frames:06d}.png"
        try:
            Image.fromarray(np.ascontiguousarray(frame[..., :3])).save(target, compress_level=4)
        except OSError as error:
            target.unlink(missing_ok=True)
            raise FilmError(f"cannot write {target}: {error.strerror or error}") from None
        self.frames += 1

    def close(self) -> None:
        """Nothing is left to do: every frame is a whole file."""
