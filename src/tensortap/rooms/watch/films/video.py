"""Films on disk, written frame by frame: H.264 in MP4, or GIF.

A film that is being written is a fragmented MP4 with one fragment per frame: if the program is
killed, what is on disk still plays. When the film is closed it gets the index of a plain MP4, so
that players know its length. A film never replaces an existing file.
"""

from __future__ import annotations

import contextlib
import fractions
import io
import numbers
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.core.errors import MissingExtra, TensortapError

Frame = NDArray[np.uint8]

FORMATS = ("mp4", "gif")
_MAX_FPS = 240.0
_MAX_GIF_FPS = 50.0
_KEY_SECONDS = 2.0  # between frames to which a player can jump
_HYBRID = (61, 7)  # version of libavformat that can turn fragments into a plain MP4
# frames are written at once; one thread, because the processors belong to training
_X264 = {"preset": "veryfast", "tune": "zerolatency", "crf": "20"}


class FilmError(TensortapError):
    """A film cannot be written."""


def need_av() -> Any:
    """Return PyAV, or raise MissingExtra."""
    try:
        import av
    except ImportError:
        raise MissingExtra("films need PyAV: pip install 'tensortap[video]'") from None
    return av


def check_fps(fps: Any) -> float:
    """Return frames per second, or raise if that is impossible.

    >>> check_fps(20)
    20.0
    """
    if not isinstance(fps, numbers.Real) or not 0 < float(fps) <= _MAX_FPS:
        raise TensortapError(f"fps must be more than 0 and at most {_MAX_FPS:.0f}, got {fps!r}")
    return float(fps)


class VideoWriter:
    """Makes a film of RGBA frames; raises FileExistsError if the file exists."""

    def __init__(self, path: Path, form: str, size: tuple[int, int], fps: float) -> None:
        self.path, self.frames = path, 0
        codec = Mp4Codec(size, fps) if form == "mp4" else GifCodec(size, fps)
        self._codec = codec
        try:
            self._file = FilmFile(path)
        except FileExistsError:
            raise
        except OSError as error:
            raise FilmError(f"cannot write the film {path}: {error.strerror}") from None
        self._open = True
        self._complete = 0  # bytes up to the end of the last complete frame
        try:
            self._container = need_av().open(
                self._file, "w", format=codec.form, options=codec.options
            )
            self._stream = codec.add_stream(self._container)
        except BaseException:
            self._file.close()
            path.unlink(missing_ok=True)
            raise

    def write(self, frame: Frame) -> None:
        """Add a frame; all frames before it are on disk when this returns."""
        if not self._open:
            raise FilmError(f"the film {self.path} has been closed")
        picture, duration = self._codec.picture(frame, self.frames)
        try:
            for packet in self._stream.encode(picture):
                # an older PyAV has no setter: then players guess the duration of the last frame
                with contextlib.suppress(AttributeError):
                    packet.duration = duration
                self._container.mux(packet)
        except Exception as error:
            self._abandon()
            raise self._error(error) from error
        self.frames += 1
        self._complete = self._file.tell()

    def close(self) -> None:
        """Complete the file with its index."""
        if not self._open:
            return
        if not self.frames:
            self._abandon()
            return
        try:
            self._container.mux(self._stream.encode(None))
            self._container.close()
        except Exception as error:
            self._abandon()
            raise self._error(error) from error
        self._open = False
        self._file.close()

    def _error(self, error: Exception) -> FilmError:
        reason = self._file.error or error
        why = getattr(reason, "strerror", None) or str(reason)
        return FilmError(f"the film {self.path} ends after {self.frames} frames: {why}")

    def _abandon(self) -> None:
        """Close the file after its last complete frame."""
        self._open = False
        with contextlib.suppress(Exception):  # the error has been raised already
            self._container.close()
        if self._file.is_owner:
            with contextlib.suppress(OSError):  # players skip a torn frame
                self._file.truncate(self._complete)
        self._file.close()


class FilmFile(io.FileIO):
    """A new file for PyAV, which drops the reason of an error: this keeps it.

    The file belongs to the process that created it: a forked child that closes its copy of a film
    must neither write into the file nor move the position, which both processes share.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "x+")
        self.error: OSError | None = None
        self._owner = os.getpid()

    @property
    def is_owner(self) -> bool:
        """Return whether this process created the file."""
        return os.getpid() == self._owner

    def write(self, data: Any) -> int:
        view = memoryview(data)
        done = 0 if self.is_owner else len(view)
        try:
            while done < len(view):
                done += super().write(view[done:])
        except OSError as error:
            self.error = error
            raise
        return done

    def seek(self, offset: int, whence: int = 0) -> int:
        return super().seek(offset, whence) if self.is_owner else offset


class Mp4Codec:
    """H.264 as browsers play it."""

    form = "mp4"

    def __init__(self, size: tuple[int, int], fps: float) -> None:
        self._size, self._fps = size, fps
        self._rate = fractions.Fraction(fps).limit_denominator(1001)
        flags = "frag_every_frame+empty_moov+default_base_moof"
        if tuple(need_av().library_versions["libavformat"][:2]) >= _HYBRID:
            flags += "+hybrid_fragmented"
        self.options = {"movflags": flags}

    def add_stream(self, container: Any) -> Any:
        """Add an H.264 stream to a container."""
        try:
            stream = container.add_stream("libx264", rate=self._rate)
        except Exception as error:
            raise FilmError(
                f"this PyAV has no H.264 encoder (libx264); use format='gif' ({error})"
            ) from error
        stream.width, stream.height = self._size
        stream.pix_fmt = "yuv420p"
        stream.options = {**_X264, "g": str(max(1, round(self._fps * _KEY_SECONDS)))}
        stream.codec_context.thread_count = 1
        stream.time_base = stream.codec_context.time_base = 1 / self._rate
        return stream

    def picture(self, frame: Frame, number: int) -> tuple[Any, int]:
        """Return a PyAV frame, and its duration in the time base."""
        picture = need_av().VideoFrame.from_ndarray(frame, "rgba").reformat(format="yuv420p")
        picture.pts, picture.time_base = number, 1 / self._rate
        return picture, 1


class GifCodec:
    """GIF; each frame has a palette of its own."""

    form = "gif"
    _base = fractions.Fraction(1, 100)

    def __init__(self, size: tuple[int, int], fps: float) -> None:
        self.options = {"loop": "0"}  # for ever
        self._size, self._fps = size, min(fps, _MAX_GIF_FPS)

    def add_stream(self, container: Any) -> Any:
        """Add a GIF stream to a container."""
        stream = container.add_stream("gif", rate=1 / self._base)
        stream.width, stream.height = self._size
        stream.pix_fmt = "pal8"
        stream.time_base = stream.codec_context.time_base = self._base
        return stream

    def picture(self, frame: Frame, number: int) -> tuple[Any, int]:
        """Return a PyAV frame, and its duration in the time base."""
        from PIL import Image

        rgb = Image.fromarray(np.ascontiguousarray(frame[..., :3]))
        indices = rgb.quantize(256, dither=Image.Dither.NONE)
        colors = np.full((256, 4), 255, np.uint8)  # alpha, then red, green and blue
        listed = np.array(indices.getpalette(), np.uint8).reshape(-1, 3)
        colors[: len(listed), 1:] = listed
        picture = need_av().VideoFrame.from_ndarray((np.asarray(indices), colors), "pal8")
        start, end = (round(n * 100 / self._fps) for n in (number, number + 1))
        picture.pts, picture.time_base = start, self._base
        return picture, end - start
