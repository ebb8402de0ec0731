"""From a record to a frame."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tensortap.core.record import Record
from tensortap.rooms.films.canvas import Canvas, draw_heading, draw_statistics, fitted
from tensortap.rooms.films.pictures import (
    FrameContent,
    HistogramPicture,
    ImagePicture,
    Picture,
)
from tensortap.rooms.films.projections import ProjectionPicture, point_shape
from tensortap.rooms.films.style import FrameLayout, Style
from tensortap.rooms.films.surface import SurfacePicture
from tensortap.text.tensors import number


class MessagePicture(Picture):
    """A single number as text, or the reason why there is nothing to draw."""

    def draw(self, canvas: Canvas, content: FrameContent) -> None:
        words = "no numbers to draw"
        if content.array is not None and content.array.size == 1 and content.summary is not None:
            words = number(content.summary.min, 6)
        box, size = self._layout.room, self._layout.title
        x, y = (box.left + box.right) / 2, (box.top + box.bottom) / 2
        text = fitted(words, size, box.width)
        canvas.text(x, y, text, size, self._layout.colors.dim, "middle")


_PICTURES: dict[str, type[Picture]] = {
    "image": ImagePicture,
    "surface": SurfacePicture,
    "histogram": HistogramPicture,
    "pca": ProjectionPicture,
    "tsne": ProjectionPicture,
    "message": MessagePicture,
}


def mode_for(mode: str, content: FrameContent) -> tuple[str, str]:
    """Return the mode in which a tensor is drawn, and why it is not the one of the style.

    A tensor whose shape does not fit the mode is drawn as in ``"auto"``. ``"message"`` is text.
    """
    array, shape = content.array, content.inner
    if array is None or not array.size:
        return "message", ""
    is_matrix = len(shape) == 2
    has_points = point_shape(shape) is not None
    fits = {
        "auto": False, "histogram": True, "image": is_matrix,
        "surface": is_matrix and min(shape) > 1, "pca": has_points, "tsne": has_points,
    }  # fmt: skip
    if fits[mode]:
        return mode, ""
    is_scalar = array.size == 1 and not shape
    auto = "message" if is_scalar else "image" if is_matrix else "histogram"
    return auto, "" if mode == "auto" else f"no {mode} of this shape"


class Painter:
    """Draws the frames of one film."""

    def __init__(self, style: Style) -> None:
        self.style = style
        self._layout = FrameLayout.of(style)
        self._pictures: dict[str, Picture] = {}
        self._canvas = Canvas(*style.size, style.colors.background)

    def draw(self, record: Record) -> NDArray[np.uint8]:
        """Return the frame of a record as RGBA; the next call overwrites it."""
        content = FrameContent(record)
        mode, reason = mode_for(self.style.mode, content)
        if mode not in self._pictures:
            self._pictures[mode] = _PICTURES[mode](self.style, self._layout)
        picture, canvas = self._pictures[mode], self._canvas
        canvas.fill(0, 0, *self.style.size, canvas.background)
        picture.draw(canvas, content)
        note = " · ".join(filter(None, (reason, picture.note)))
        draw_heading(canvas, self._layout, content, note)
        draw_statistics(canvas, self._layout, content)
        return canvas.bytes
