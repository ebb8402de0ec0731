"""A matrix as a landscape, drawn by NumPy alone.

The eye looks along one fixed direction, so that every column of the screen is a line over the
matrix, from front to back. Along it the highest point so far hides what is lower behind it: a
running maximum says how far up each sample reaches, and counting the samples below a pixel says
which one is seen there. No triangles, no sorting, a few passes over small arrays.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from tensortap.films.canvas import Canvas, need_pillow, text_width
from tensortap.films.image import shrunk
from tensortap.films.legend import bar_ticks, bar_width, color_bar
from tensortap.films.look import Look
from tensortap.films.scales import whole_ticks
from tensortap.films.shades import Shades, indices, shares_of
from tensortap.films.style import Box, Measures, Style
from tensortap.viz.colors import NAN, Rgb, mixed, packed
from tensortap.viz.reals import shrink

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_TURN = math.radians(30)
_TILT = math.radians(34)
_TALL = 0.40  # the height of the range on the screen, in sides of the ground
_FINEST, _COARSEST = 256, 96  # points along a side: fewer are interpolated, more are shrunk
_LIGHTS = 64  # levels of light: fewer show as rings on a smooth surface
DARKEST, BRIGHTEST = 0.32, 1.16  # light on what is turned away and on what faces it
_FINER = 2  # samples of a pixel, one above the other: smooth ridges
_ROUGH = 0.9  # the slope, on average, from which on light is softened, more and more
_LINES = 12  # lines along each side of the surface


class SurfacePicture:
    """A matrix as heights over its rows and columns."""

    aside = ""

    def __init__(self, style: Style, at: Measures) -> None:
        self._style, self._at = style, at
        self.shades = Shades(style)
        self.note = ""
        self._bar = Box(0, 0, 1, 1)
        self._view: View | None = None
        self._lit: NDArray[np.uint32] | None = None

    def see(self, look: Look) -> object:
        """What the still part of the frame depends on."""
        symmetric = self.shades.symmetric
        self.shades.see(look.summary)
        if self.shades.symmetric != symmetric:
            self._lit = None
        self.note = shrunk(look.inner, (_FINEST, _FINEST), "a point")
        return self.shades.symmetric

    def still(self, canvas: Canvas, box: Box, look: Look) -> None:
        """The ground, the walls behind, and the colour bar."""
        at, colors = self._at, self._style.colors
        rows, columns = look.inner
        left = right = below = 0
        if at.header:  # what is written beside the corners
            below = at.small * 2
            left, right = at.small * 2, text_width(str(columns), at.small)
        room = Box(box.left + left, box.top, box.right - right - bar_width(at), box.bottom - below)
        self._view = View(rows, columns, room)
        scenery(canvas, self._view, colors.panel, colors.line)
        if at.header:
            _labels(canvas, self._style, at, self._view)
            high = round(room.height * 0.12)
            bar = Box(box.left, box.top + high, box.right, room.bottom - high // 2)
            self._bar = color_bar(canvas, at, bar, self.shades.pixels)

    def draw(self, canvas: Canvas, box: Box, look: Look) -> None:
        """The surface of this frame."""
        matrix, view = look.matrix, self._view
        assert matrix is not None
        assert view is not None
        if self._lit is None:
            theme = self._style.colors
            walls = mixed(theme.line, theme.background, 0.3), mixed(theme.line, theme.dim, 0.15)
            self._lit = lit_colors(self.shades.pixels, walls)
        summary = look.summary
        finite = summary is not None and summary.finite == summary.count
        cells = shrink(matrix, _FINEST, _FINEST, self.shades.middle)
        drawn = view.draw(cells, self.shades, finite, self._lit)
        area = view.area
        under = canvas.pixels[area.top : area.bottom, area.left : area.right]
        under[:] = drawn_over(under, drawn)
        if self._at.header:
            bar_ticks(canvas, self._style, self._at, self._bar, self.shades.limits)


def lit_colors(pixels: NDArray[np.uint32], walls: tuple[Rgb, Rgb]) -> NDArray[np.uint32]:
    """The colours of a map under each light, then both walls and nothing (0)."""
    import numpy as np

    rgb = pixels.view(np.uint8).reshape(-1, 4)[:, :3].astype(np.float64)
    light = np.linspace(DARKEST, BRIGHTEST, _LIGHTS)[None, :, None]
    lit = (rgb[:, None, :] * light).clip(0, 255)
    lit[NAN:] = rgb[NAN:, None, :]  # what is not finite shines by itself
    table = packed(np.rint(lit).astype(np.uint8)).reshape(-1)
    return np.concatenate([table, packed(np.array(walls)), np.zeros(1, np.uint32)])


def drawn_over(under: NDArray[np.uint32], drawn: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Two half pixels, one above the other, over what is there: their average."""
    import numpy as np

    upper, lower = drawn[0::2], drawn[1::2]
    upper = np.where(upper, upper, under)
    lower = np.where(lower, lower, under)
    half = np.bitwise_xor(upper, lower)
    half &= np.uint32(0xFEFEFEFE)
    half >>= np.uint32(1)
    upper &= lower
    half += upper
    return half


class View:
    """A matrix of some shape seen in some room: everything that no value changes."""

    def __init__(self, rows: int, columns: int, room: Box) -> None:
        import numpy as np

        self.rows, self.columns = rows, columns
        across = abs(math.cos(_TURN)) + abs(math.sin(_TURN))
        tilt = math.sin(_TILT)
        scale = min(room.width / across, room.height / (across * tilt + _TALL)) * 0.985
        width, height = max(2, int(scale * across)), max(2, int(scale * (across * tilt + _TALL)))
        left = room.left + (room.width - width) // 2
        top = room.top + (room.height - height) // 2
        self.area = Box(left, top, left + width, top + height)
        self._scale, self._across = scale, across
        self._rise = scale * _TALL * _FINER
        self._grid = tuple(min(max(n, _COARSEST), _FINEST) for n in (rows, columns))
        depth = max(2, int(scale * across * tilt))
        x = (np.arange(width) + 0.5) / width * across - across / 2
        # the first sample lies before the ground, wherever its corner is
        away = (np.arange(-1, depth) + 0.5) / depth * across - across / 2
        # where on the ground each sample is, in shares of the side
        a = x[None, :] * math.cos(_TURN) + away[:, None] * math.sin(_TURN) + 0.5
        b = x[None, :] * math.sin(_TURN) - away[:, None] * math.cos(_TURN) + 0.5
        inside = (a >= 0) & (a <= 1) & (b >= 0) & (b <= 1)
        self._corners(a, b, inside)
        ground = (away + across / 2) * scale * tilt * _FINER
        self._ground = np.broadcast_to(ground[:, None], inside.shape)[inside].astype(np.float32)
        self._reach = np.empty(inside.shape, np.float32)
        self._lanes = list(self._reach)
        front = inside.argmax(axis=0)
        self._front = np.rint(ground[front]).clip(0).astype(np.int32)
        self._codes(a, b, inside, front)
        self._columns = np.arange(width, dtype=np.int32)

    def _corners(self, a: NDArray[Any], b: NDArray[Any], inside: NDArray[Any]) -> None:
        """The four points of the matrix around each sample, and how much each counts."""
        import numpy as np

        rows, columns = self._grid
        y, x = b.clip(0, 1) * (rows - 1), a.clip(0, 1) * (columns - 1)
        i = np.minimum(y.astype(np.int64), rows - 2)
        j = np.minimum(x.astype(np.int64), columns - 2)
        self._at = np.flatnonzero(inside)
        keep = inside.ravel()
        self._place = (i * columns + j).ravel()[keep].astype(np.intp)
        self._right = (x - j).ravel()[keep].astype(np.float32)
        self._down = (y - i).ravel()[keep].astype(np.float32)

    def _codes(
        self, a: NDArray[Any], b: NDArray[Any], inside: NDArray[Any], front: NDArray[Any]
    ) -> None:
        """Whose colour each sample has: a point of the matrix, a wall, or nothing."""
        import numpy as np

        rows, columns = self._grid
        width = inside.shape[1]
        y = np.rint(b.clip(0, 1) * (rows - 1)).astype(np.int32)
        x = np.rint(a.clip(0, 1) * (columns - 1)).astype(np.int32)
        nothing = rows * columns + 2
        codes = np.where(inside, y * columns + x, nothing)
        touched = inside.any(axis=0)
        across = np.arange(width)
        # the wall along the rows is left of the corner in front, that along the columns right
        corner = (0.5 * (math.sin(_TURN) - math.cos(_TURN)) / self._across + 0.5) * width
        wall = np.where(across < corner, rows * columns, rows * columns + 1)
        codes[front[touched], across[touched]] = wall[touched]
        # behind the last there is nothing
        edge = np.full((1, width), nothing)
        self._seen = np.ascontiguousarray(np.concatenate([codes, edge]).astype(np.intp))
        lines_y = (np.arange(rows) % max(1, round((rows - 1) / _LINES))) == 0
        lines_x = (np.arange(columns) % max(1, round((columns - 1) / _LINES))) == 0
        self._lines = (lines_y[:, None] | lines_x[None, :]) * np.float32(0.1 * _LIGHTS)

    def draw(
        self, cells: NDArray[Any], shades: Shades, finite: bool, lit: NDArray[np.uint32]
    ) -> NDArray[np.uint32]:
        """The surface, pixels twice as high as the area; 0 where there is none."""
        import numpy as np

        heights, colors = self._heights(cells, shades, finite, lit)
        columns = heights.shape[1]
        flat = heights.reshape(-1)
        # bilinear: between the two points above, between the two below, between both
        near = flat.take(self._place)
        near += (flat[1:].take(self._place) - near) * self._right
        far = flat[columns:].take(self._place)
        far += (flat[columns + 1 :].take(self._place) - far) * self._right
        far -= near
        far *= self._down
        near += far
        near *= self._rise
        near += self._ground
        reach = self._reach
        reach.fill(-1)
        reach.reshape(-1)[self._at] = near
        # row by row: three times as fast as one call that goes down column by column
        for before, row in itertools.pairwise(self._lanes):
            np.maximum(before, row, out=row)
        # up to which row of pixels each sample and those before it reach
        level = reach.astype(np.int32)
        np.maximum(level, self._front, out=level)
        width, top = self.area.width, self.area.height * _FINER
        np.minimum(level, top, out=level)
        level *= width
        level += self._columns
        below = np.bincount(level.reshape(-1), minlength=(top + 1) * width)
        # how many samples end below a pixel: the next one is seen there
        sample = below[: top * width].reshape(top, width)
        sample *= width
        sample[0] += self._columns
        np.cumsum(sample, axis=0, out=sample)
        return colors.take(self._seen).reshape(-1).take(sample, mode="clip")[::-1]

    def _heights(
        self, cells: NDArray[Any], shades: Shades, finite: bool, lit: NDArray[np.uint32]
    ) -> tuple[NDArray[Any], NDArray[np.uint32]]:
        """Heights from 0 to 1 and colours, at every point of the grid."""
        import numpy as np

        rows, columns = self._grid
        codes = None
        if not finite:
            codes = indices(cells, shades.limits, finite=False)
            # spikes: in a pit it could be hidden
            cells = np.where(codes >= NAN, shades.limits[1], cells)
        share = shares_of(cells, shades.limits).astype(np.float32, copy=False)
        share = _stretched(_stretched(share, rows).T, columns).T
        # light from the upper left: slopes towards it are bright
        slope = np.zeros_like(share)
        slope[:, 1:] += share[:, 1:] - share[:, :-1]
        slope *= columns / rows
        slope[1:] += share[1:] - share[:-1]
        slope *= rows * _TALL
        # noise is all slopes: in full light it would be black and white and hide every colour
        rough = math.sqrt(float(np.dot(slope.reshape(-1), slope.reshape(-1))) / slope.size)
        if rough > _ROUGH:
            slope *= (_ROUGH / rough) ** 1.25
        light = slope / np.sqrt(1 + slope * slope)
        light *= 0.5 * (_LIGHTS - 1) * 0.72
        light += 0.66 * (_LIGHTS - 1)
        light -= self._lines
        np.clip(light, 0, _LIGHTS - 1, out=light)
        place = (share * np.float32(NAN - 1)).astype(np.int32)
        if codes is not None:
            y = np.rint(np.linspace(0, codes.shape[0] - 1, rows)).astype(np.int64)
            x = np.rint(np.linspace(0, codes.shape[1] - 1, columns)).astype(np.int64)
            strange = _wider(codes[y[:, None], x[None, :]])
            place = np.where(strange >= NAN, strange, place).astype(np.int32)
        place *= _LIGHTS
        place += light.astype(np.int32)
        return share, np.concatenate([lit.take(place.reshape(-1)), lit[-3:]])

    def on_screen(self, a: float, b: float, z: float) -> tuple[float, float]:
        """The pixel of a point: columns and rows from 0 to 1, height from 0 to 1."""
        a, b = a - 0.5, b - 0.5
        x = a * math.cos(_TURN) + b * math.sin(_TURN) + self._across / 2
        away = a * math.sin(_TURN) - b * math.cos(_TURN) + self._across / 2
        up = away * self._scale * math.sin(_TILT) + z * self._rise / _FINER
        return self.area.left + x * self._scale, self.area.bottom - up


def _wider(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What is not finite takes the points beside it as well: a single one would hardly be seen."""
    import numpy as np

    strange = np.where(codes >= NAN, codes, 0).astype(np.uint8)
    for axis in (0, 1):
        near = np.swapaxes(strange.copy(), 0, axis)
        wide = np.swapaxes(strange, 0, axis)
        np.maximum(wide[1:], near[:-1], out=wide[1:])
        np.maximum(wide[:-1], near[1:], out=wide[:-1])
    return strange


def _stretched(values: NDArray[Any], points: int) -> NDArray[Any]:
    """So many points along the first axis, between the values that there are, linearly."""
    import numpy as np

    cells = len(values)
    if cells == points:
        return values
    at = np.linspace(0, cells - 1, points)
    first = np.minimum(at.astype(np.int64), max(cells - 2, 0))
    rest = (at - first).astype(np.float32)[:, None]
    found: NDArray[Any] = values[first]
    found += (values[np.minimum(first + 1, cells - 1)] - found) * rest
    return found


def scenery(canvas: Canvas, view: View, panel: Rgb, line: Rgb) -> None:
    """The ground and the two walls behind the surface, with thin lines."""
    import numpy as np

    image_module = need_pillow()
    from PIL import ImageDraw

    fine = 3
    area = Box(view.area.left - 2, view.area.top - 2, view.area.right + 2, view.area.bottom + 2)
    whole = image_module.new("L", (area.width * fine, area.height * fine))
    lines = image_module.new("L", whole.size)
    paint, draw = ImageDraw.Draw(whole), ImageDraw.Draw(lines)

    def at(a: float, b: float, z: float) -> tuple[float, float]:
        x, y = view.on_screen(a, b, z)
        return (x - area.left) * fine, (y - area.top) * fine

    ground = [at(0, 0, 0), at(1, 0, 0), at(1, 1, 0), at(0, 1, 0)]
    behind = [at(0, 0, 0), at(1, 0, 0), at(1, 0, 1), at(0, 0, 1)]
    beside = [at(1, 0, 0), at(1, 1, 0), at(1, 1, 1), at(1, 0, 1)]
    for polygon in (ground, behind, beside):
        paint.polygon(polygon, fill=255)
        draw.polygon(polygon, outline=255, width=fine)
    for part in (0.25, 0.5, 0.75):
        draw.line([at(part, 0, 0), at(part, 0, 1)], fill=150, width=fine)
        draw.line([at(1, part, 0), at(1, part, 1)], fill=150, width=fine)
        draw.line([at(0, 0, part), at(1, 0, part), at(1, 1, part)], fill=150, width=fine)
    canvas.stamp(np.asarray(whole.reduce(fine)), area.left, area.top, panel)
    canvas.stamp(np.asarray(lines.reduce(fine)), area.left, area.top, line)


def _most_labels(view: View, size: int) -> tuple[int, int]:
    """How many numbers have room along the rows and along the columns."""
    corner, behind, beside = (
        view.on_screen(0, 1, 0),
        view.on_screen(0, 0, 0),
        view.on_screen(1, 1, 0),
    )
    high = abs(corner[1] - behind[1]) / (size * 1.7)
    wide = abs(beside[0] - corner[0]) / (text_width(str(view.columns), size) + size * 0.7)
    return min(4, max(1, int(high))), min(6, max(1, int(wide)))


def _labels(canvas: Canvas, style: Style, at: Measures, view: View) -> None:
    """Rows along the edge in front on the left, columns along that on the right."""
    colors = style.colors
    rows, columns = _most_labels(view, at.small)
    for row in whole_ticks(view.rows, rows):
        x, y = view.on_screen(0, (row + 0.5) / view.rows, 0)
        canvas.text(
            x - at.small * 0.5, y + at.small * 0.75, str(row), at.small, colors.dim, "right"
        )
    for column in whole_ticks(view.columns, columns):
        x, y = view.on_screen((column + 0.5) / view.columns, 1, 0)
        canvas.text(x + at.small * 0.25, y + at.small * 0.85, str(column), at.small, colors.dim)
