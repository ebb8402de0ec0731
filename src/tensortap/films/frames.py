"""From a record to a frame: which picture shows it, and what stands around the picture."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

from tensortap.films.canvas import Canvas
from tensortap.films.curve import CurvePicture
from tensortap.films.grid import GridPicture, tile_shape
from tensortap.films.histogram import HistogramPicture
from tensortap.films.image import ImagePicture
from tensortap.films.legend import figures, heading, words_in_the_middle
from tensortap.films.look import Look, look_at
from tensortap.films.projections import ProjectionPicture, point_shape
from tensortap.films.style import Box, Measures, Style
from tensortap.films.surface import BRIGHTEST, DARKEST, SurfacePicture
from tensortap.record import Record
from tensortap.viz.colors import NAN_COLOR, NEGINF_COLOR, POSINF_COLOR

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Picture(Protocol):
    """One way to draw tensors, with what it remembers from frame to frame.

    `see` is told of every frame first and returns what `still` depends on; `still` draws what
    stays while that is the same, `draw` what moves. `note` is for the heading: what is not shown
    as it is; `aside` goes there, too, if there is room.
    """

    note: str
    aside: str

    def see(self, look: Look) -> object: ...

    def still(self, canvas: Canvas, box: Box, look: Look) -> None: ...

    def draw(self, canvas: Canvas, box: Box, look: Look) -> None: ...


def mode_for(mode: str, look: Look) -> tuple[str, str]:
    """The mode in which a tensor can be drawn, and why that is not the one asked for.

    What has no rows and columns is no image, and so on: it is drawn as ``"auto"`` would.
    """
    if look.array is None:
        return ("histogram" if look.summary is not None and look.summary.bins else "words"), ""
    if not look.array.size:
        return "words", ""
    fits = {
        "auto": True,
        "image": look.matrix is not None,
        "surface": look.matrix is not None and min(look.inner) > 1,
        "histogram": True,
        "pca": point_shape(look.inner) is not None,
        "pca_lowrank": point_shape(look.inner) is not None,
        "tsne": point_shape(look.inner) is not None,
        "grid": tile_shape(look.inner) is not None,
    }
    if mode != "auto" and fits[mode]:
        return mode, ""
    found = "curve" if look.is_scalar else "image" if look.matrix is not None else "histogram"
    return found, "" if mode == "auto" else f"no {mode} of this shape"


class Painter:
    """Draws the frames of one film.

    >>> import numpy as np
    >>> from tensortap import Kind, Record, TensorData
    >>> x = np.eye(4, dtype=np.float32)
    >>> value = TensorData("numpy", "float32", x.shape, x.tobytes())
    >>> painter = Painter(Style(size=(320, 240)))
    >>> painter.draw(Record("x", Kind.VALUE, 0, 0, 0, 0, 1, 0, value=value)).shape
    (240, 320, 4)
    """

    def __init__(self, style: Style) -> None:
        self.style = style
        width, height = style.size
        self._at = Measures.of(width, height)
        self._pictures: dict[str, Picture] = {}
        self._still = Canvas(width, height, style.colors.background)
        self._canvas = Canvas(width, height, style.colors.background)
        self._drawn_for: object = None

    def draw(self, record: Record) -> NDArray[np.uint8]:
        """The frame of a record: red, green, blue and 255; good until the next one is drawn."""
        style, at = self.style, self._at
        look = look_at(record)
        mode, why = mode_for(style.mode, look)
        picture = self._picture(mode)
        depends = picture.see(look) if picture is not None else None
        note = " · ".join(filter(None, (why, picture.note if picture is not None else "")))
        aside = picture.aside if picture is not None else ""
        width, height = style.size
        box = at.room(style.size)
        key = (
            mode, note, aside, depends, look.name, look.kind, look.dtype, look.shape, look.rank,
            look.world_size, look.device, look.message,
        )  # fmt: skip
        if key != self._drawn_for:
            self._still.fill(0, 0, width, height, style.colors.background)
            heading(self._still, style, at, look, note, aside)
            if picture is not None:
                picture.still(self._still, box, look)
            else:
                words_in_the_middle(self._still, style, at, box, _nothing(look))
            self._drawn_for = key
        self._canvas.copy_from(self._still)
        if picture is not None:
            picture.draw(self._canvas, box, look)
        figures(self._canvas, style, at, look)
        return self._canvas.bytes

    def palette(self) -> NDArray[np.uint8]:
        """Colours that frames are made of, for formats that have only 256."""
        import numpy as np

        colors = self.style.colors
        share = np.linspace(0, 1, 10)[:, None]
        ground = np.array(colors.background)
        inks = [ground + (np.array(ink) - ground) * share for ink in (colors.ink, colors.dim)]
        alone = np.array([*colors, NAN_COLOR, POSINF_COLOR, NEGINF_COLOR])
        maps = []
        for picture in self._pictures.values():
            if isinstance(picture, (ImagePicture, GridPicture, SurfacePicture)):
                maps.append(picture.shades.table)
            if isinstance(picture, SurfacePicture):
                light = np.linspace(DARKEST, BRIGHTEST, 10)[:, None, None]
                maps.append((picture.shades.table[::4] * light).clip(0, 255).reshape(-1, 3))
        found = np.concatenate([np.repeat(alone, 8, axis=0), *inks, *maps])
        listed: NDArray[np.uint8] = np.rint(found).astype(np.uint8)
        return listed

    def _picture(self, mode: str) -> Picture | None:
        if mode == "words":
            return None
        found = self._pictures.get(mode)
        if found is None:
            found = self._pictures[mode] = _make(mode, self.style, self._at)
        return found


def _make(mode: str, style: Style, at: Measures) -> Picture:
    if mode in ("pca", "pca_lowrank", "tsne"):
        return ProjectionPicture(style, at, mode)
    makers: dict[str, Any] = {
        "image": ImagePicture,
        "surface": SurfacePicture,
        "histogram": HistogramPicture,
        "grid": GridPicture,
        "curve": CurvePicture,
    }
    made: Picture = makers[mode](style, at)
    return made


def _nothing(look: Look) -> str:
    if look.dtype and not math.prod(look.shape):
        return "empty"
    if look.dtype:
        return f"{look.dtype} holds no numbers"
    return "no tensor, and no statistics of one"
