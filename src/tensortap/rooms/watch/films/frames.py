"""From a record to a frame."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tensortap.core.record import Record
from tensortap.rooms.figures.colors import NAN_COLOR, NEGINF_COLOR, POSINF_COLOR
from tensortap.rooms.watch.films.canvas import Canvas, fitted
from tensortap.rooms.watch.films.images import GridPicture, ImagePicture, tile_shape
from tensortap.rooms.watch.films.legend import draw_heading, draw_statistics
from tensortap.rooms.watch.films.picture import FrameContent, Picture
from tensortap.rooms.watch.films.plots import CurvePicture, HistogramPicture
from tensortap.rooms.watch.films.projections import ProjectionPicture, point_shape
from tensortap.rooms.watch.films.style import FrameLayout, Style
from tensortap.rooms.watch.films.surface import BRIGHTEST, DARKEST, SurfacePicture


class MessagePicture(Picture):
    """The reason why there is nothing to draw."""

    def draw_still(self, canvas: Canvas, content: FrameContent) -> None:
        """Write the reason."""
        reason = "neither a tensor nor statistics"
        if content.dtype:
            is_empty = not math.prod(content.shape)
            reason = "empty" if is_empty else f"{content.dtype} does not hold numbers"
        box, size = self._layout.room, self._layout.title
        x, y = (box.left + box.right) / 2, (box.top + box.bottom) / 2
        text = fitted(reason, size, box.width)
        canvas.text(x, y, text, size, self._layout.colors.dim, "middle")


_PICTURES: dict[str, type[Picture]] = {
    "image": ImagePicture,
    "surface": SurfacePicture,
    "histogram": HistogramPicture,
    "grid": GridPicture,
    "curve": CurvePicture,
    "pca": ProjectionPicture,
    "pca_lowrank": ProjectionPicture,
    "tsne": ProjectionPicture,
    "message": MessagePicture,
}


def mode_for(mode: str, content: FrameContent) -> tuple[str, str]:
    """Return the mode in which a tensor is drawn, and why it is not the one of the style.

    A tensor whose shape does not fit the mode is drawn as in ``"auto"``. ``"message"`` means that
    there is nothing to draw.
    """
    array, shape = content.array, content.inner
    if array is None:
        has_bins = content.summary is not None and content.summary.bins
        return ("histogram" if has_bins else "message"), ""
    if not array.size:
        return "message", ""
    is_matrix = len(shape) == 2
    has_points = point_shape(shape) is not None
    fits = {
        "auto": False, "histogram": True, "image": is_matrix, "grid": tile_shape(shape) is not None,
        "surface": is_matrix and min(shape) > 1,
        "pca": has_points, "pca_lowrank": has_points, "tsne": has_points,
    }  # fmt: skip
    if fits[mode]:
        return mode, ""
    is_scalar = array.size == 1 and not shape
    auto = "curve" if is_scalar else "image" if is_matrix else "histogram"
    return auto, "" if mode == "auto" else f"no {mode} of this shape"


class Painter:
    """Draws the frames of one film.

    >>> from tensortap import Kind, Record, TensorData
    >>> x = np.eye(4, dtype=np.float32)
    >>> value = TensorData("numpy", "float32", x.shape, x.tobytes())
    >>> painter = Painter(Style(size=(320, 240)))
    >>> painter.draw(Record("x", Kind.VALUE, 0, 0, 0, 0, 1, 0, value=value)).shape
    (240, 320, 4)
    """

    def __init__(self, style: Style) -> None:
        self.style = style
        self._layout = FrameLayout.of(style)
        self._pictures: dict[str, Picture] = {}
        self._still, self._canvas = (
            Canvas(*style.size, style.colors.background) for _ in ("still", "moving")
        )
        self._still_key: object = None

    def draw(self, record: Record) -> NDArray[np.uint8]:
        """Return the frame of a record as RGBA; the next call overwrites it."""
        content = FrameContent(record)
        mode, reason = mode_for(self.style.mode, content)
        if mode not in self._pictures:
            self._pictures[mode] = _PICTURES[mode](self.style, self._layout)
        picture = self._pictures[mode]
        key = picture.prepare(content)
        note = " · ".join(filter(None, (reason, picture.note)))
        whole_key = (
            mode, note, key, record.name, record.kind, content.dtype, content.shape,
            record.rank, record.world_size, content.device, content.message,
        )  # fmt: skip
        if whole_key != self._still_key:
            self._still.fill(0, 0, *self.style.size, self.style.colors.background)
            draw_heading(self._still, self._layout, content, note)
            picture.draw_still(self._still, content)
            self._still_key = whole_key
        self._canvas.pixels[:] = self._still.pixels
        picture.draw_moving(self._canvas, content)
        draw_statistics(self._canvas, self._layout, content)
        return self._canvas.bytes

    def palette(self) -> NDArray[np.uint8]:
        """Return the colors of the frames so far, for formats that have only 256."""
        colors = self.style.colors
        share = np.linspace(0, 1, 10)[:, None]
        background = np.array(colors.background)
        inks = [background + (np.array(c) - background) * share for c in (colors.ink, colors.dim)]
        single = np.array([*colors, NAN_COLOR, POSINF_COLOR, NEGINF_COLOR])
        maps = []
        for picture in self._pictures.values():
            if isinstance(picture, (ImagePicture, GridPicture, SurfacePicture)):
                maps.append(picture.scale.table)
            if isinstance(picture, SurfacePicture):
                light = np.linspace(DARKEST, BRIGHTEST, 10)[:, None, None]
                maps.append((picture.scale.table[::4] * light).clip(0, 255).reshape(-1, 3))
        found = np.concatenate([np.repeat(single, 8, axis=0), *inks, *maps])
        palette: NDArray[np.uint8] = np.rint(found).astype(np.uint8)
        return palette
