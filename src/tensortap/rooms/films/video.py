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


class FilmError(TensortapError):
    """A film cannot be written."""


def need_av() -> Any:
    """Return PyAV, or raise MissingExtra."""
    try:
        import av
    except ImportError:
        raise MissingExtra.of("films need PyAV", "video") from None
    return av


def check_fps(fps: Any) -> float:
    """Return frames per second, or raise if that is impossible."""
    if not isinstance(fps, numbers.Real) or not 0 < float(fps) <= 240:
        raise TensortapError(f"fps must be more than 0 and at most 240, got {fps!r}")
    return float(fps)


class VideoWriter:
    """Makes a film of RGBA frames; raises FileExistsError if the file exists."""

    def __init__(self, path: Path, form: str, size: tuple[int, int], fps: float) -> None:
        av = need_av()
        self.path, self.frames = path, 0
        self._is_gif = form == "gif"
        # GIF counts hundredths of a second; players slow down pauses below two of them
        self._fps = min(fps, 50.0) if self._is_gif else fps
        rate = fractions.Fraction(fps).limit_denominator(1001)
        self._base = fractions.Fraction(1, 100) if self._is_gif else 1 / rate
        try:
            self._file = FilmFile(path)
        except FileExistsError:
            raise
        except OSError as error:
            raise FilmError(f"cannot write the film {path}: {error.strerror}") from None
        self._open = True
        self._complete = 0  # bytes up to the end of the last complete frame
        options = {"loop": "0"}  # for ever
        if not self._is_gif:
            options = {"movflags": "frag_every_frame+empty_moov+default_base_moof"}
            # this version of libavformat can turn fragments into a plain MP4
            if tuple(av.library_versions["libavformat"][:2]) >= (61, 7):
                options["movflags"] += "+hybrid_fragmented"
        try:
            self._container = av.open(self._file, "w", format=form, options=options)
            self._stream = self._add_stream(size)
        except BaseException:
            self._file.close()
            path.unlink(missing_ok=True)
            raise

    def _add_stream(self, size: tuple[int, int]) -> Any:
        codec = "gif" if self._is_gif else "libx264"
        try:
            stream = self._container.add_stream(codec, rate=1 / self._base)
        except Exception as error:
            raise FilmError(
                f"this PyAV has no H.264 encoder (libx264); use format='gif' ({error})"
            ) from error
        stream.width, stream.height = size
        stream.pix_fmt = "pal8" if self._is_gif else "yuv420p"
        if not self._is_gif:
            # frames are written at once; a player can jump to one frame every two seconds
            speed = {"preset": "veryfast", "tune": "zerolatency", "crf": "20"}
            stream.options = {**speed, "g": str(max(1, round(self._fps * 2)))}
            stream.codec_context.thread_count = 1  # the processors belong to training
        stream.time_base = stream.codec_context.time_base = self._base
        return stream

    def write(self, frame: Frame) -> None:
        """Add a frame; all frames before it are on disk when this returns."""
        if not self._open:
            raise FilmError(f"the film {self.path} has been closed")
        start, duration = self.frames, 1
        if self._is_gif:
            picture = _with_palette(frame)
            start, end = (round(n * 100 / self._fps) for n in (self.frames, self.frames + 1))
            duration = end - start
        else:
            picture = need_av().VideoFrame.from_ndarray(frame, "rgba").reformat(format="yuv420p")
        picture.pts, picture.time_base = start, self._base
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


def _with_palette(frame: Frame) -> Any:
    """Return a PyAV frame with a palette of its own, for a GIF."""
    from PIL import Image

    rgb = Image.fromarray(np.ascontiguousarray(frame[..., :3]))
    indices = rgb.quantize(256, dither=Image.Dither.NONE)
    colors = np.full((256, 4), 255, np.uint8)  # alpha, then red, green and blue
    listed = np.array(indices.getpalette(), np.uint8).reshape(-1, 3)
    colors[: len(listed), 1:] = listed
    return need_av().VideoFrame.from_ndarray((np.asarray(indices), colors), "pal8")
