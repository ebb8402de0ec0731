"""Options for the frames of a film: colors, layout, range and ticks."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.core.errors import TensortapError
from tensortap.rooms.figures.reals import Range, nonempty
from tensortap.text.tensors import number

Rgb = tuple[int, int, int]

STEPS = 253  # colors of a map; with the three below, an index fits in one byte
NAN, POSINF, NEGINF = 253, 254, 255

NAN_COLOR: Rgb = (255, 0, 220)
POSINF_COLOR: Rgb = (255, 45, 45)
NEGINF_COLOR: Rgb = (0, 229, 255)

SEQUENTIAL = "310047 43337c 1f689d 009d90 5ac576 c7e03e fff467"
DIVERGING = "123780 2f6eb5 70acd8 c1dbeb f3f4f1 e9d3b6 dc914b a65216 65280d"


class FilmTheme(NamedTuple):
    """The colors around a picture."""

    background: Rgb
    panel: Rgb  # behind a plot
    ink: Rgb  # headings and numbers
    dim: Rgb  # labels and ticks
    line: Rgb  # axes and grids
    accent: Rgb  # bars, curves, the message


THEME = FilmTheme(
    (15, 18, 25), (22, 27, 36), (236, 240, 246), (142, 153, 170), (52, 60, 74), (86, 180, 233)
)


def parse_color(color: str | Sequence[int]) -> Rgb:
    """Return red, green and blue of ``"#rrggbb"``, a color name, or three numbers.

    >>> parse_color("#ff8000"), parse_color("white"), parse_color((1, 2, 3))
    ((255, 128, 0), (255, 255, 255), (1, 2, 3))
    """
    if isinstance(color, str):
        from PIL import ImageColor

        try:
            red, green, blue = ImageColor.getrgb(color)[:3]
        except ValueError:
            raise TensortapError(
                f"unknown color {color!r}: use '#rrggbb', a name like 'orange', or three numbers"
            ) from None
        return red, green, blue
    try:
        numbers = tuple(int(part) for part in color)
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) != 3 or not all(0 <= part <= 255 for part in numbers):
        raise TensortapError(f"a color is three numbers from 0 to 255, got {color!r:.80}")
    return numbers[0], numbers[1], numbers[2]


def mixed(a: Rgb, b: Rgb, share: float) -> Rgb:
    """Return a color between two.

    >>> mixed((0, 0, 0), (100, 200, 50), 0.5)
    (50, 100, 25)
    """
    red, green, blue = (round(x + (y - x) * share) for x, y in zip(a, b, strict=True))
    return red, green, blue


def color_table(colormap: str) -> NDArray[np.uint8]:
    """Return the ``(253, 3)`` colors of a map, given by its anchors.

    >>> color_table("000000 ffffff")[[0, -1]].tolist()
    [[0, 0, 0], [255, 255, 255]]
    """
    anchors = np.array([tuple(bytes.fromhex(color)) for color in colormap.split()], np.float64)
    at = np.linspace(0, len(anchors) - 1, STEPS)
    parts = [np.interp(at, np.arange(len(anchors)), part) for part in anchors.T]
    table: NDArray[np.uint8] = np.rint(np.stack(parts, 1)).astype(np.uint8)
    return table


def packed(rgb: Any) -> NDArray[np.uint32]:
    """Return colors as pixels of four bytes: red, green, blue, 255.

    >>> packed([[1, 2, 3]]).view(np.uint8).tolist()
    [1, 2, 3, 255]
    """
    colors = np.asarray(rgb, np.uint8)
    pixels = np.full((*colors.shape[:-1], 4), 255, np.uint8)
    pixels[..., :3] = colors
    return pixels.view(np.uint32)[..., 0]


def pixel_table(table: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return 256 pixels: the colors of a map, then those of NaN, +Inf and -Inf."""
    return packed(np.concatenate([table, [NAN_COLOR, POSINF_COLOR, NEGINF_COLOR]]))


MODES = ("auto", "image", "surface", "histogram", "pca", "tsne")
SEED = 0  # for sampling rows, and for t-SNE: the same film each time
Ticks = list[tuple[float, str]]  # positions and labels
_MIN_SIZE, _MAX_SIZE = (160, 120), 8192  # pixels; text has no room in smaller frames

_SHRINK = 0.1  # share of the way to the tensor's own range, per frame
_LARGEST = 8.9e307  # half of the largest float64, so that a difference of two is finite


class Box(NamedTuple):
    """A rectangle in pixels, without its right and bottom edge."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def width(self) -> int:
        return self.right - self.left

    @property
    def height(self) -> int:
        return self.bottom - self.top

    def centered(self, width: int, height: int) -> Box:
        left = self.left + (self.width - width) // 2
        top = self.top + (self.height - height) // 2
        return Box(left, top, left + width, top + height)


def _is_pair(pair: Any, kind: type) -> bool:
    try:
        return len(pair) == 2 and all(isinstance(number, kind) for number in pair)
    except TypeError:
        return False


@dataclasses.dataclass(frozen=True)
class Style:
    """Size (rounded up to even sides, as H.264 needs), mode, colors and range of frames.

    Everything is checked here, in the user's process, before a frame is drawn in another one.
    """

    size: tuple[int, int] = (640, 480)
    mode: str = "auto"
    range: str | tuple[float, float] = "follow"
    legend_color: str | Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise TensortapError(f"mode must be one of {', '.join(MODES)}; got {self.mode!r}")
        size: Any = self.size
        if not _is_pair(size, numbers.Integral) or not (
            _MIN_SIZE[0] <= size[0] <= _MAX_SIZE and _MIN_SIZE[1] <= size[1] <= _MAX_SIZE
        ):
            raise TensortapError(
                f"size must be width and height in pixels, from {_MIN_SIZE[0]}x{_MIN_SIZE[1]} to "
                f"{_MAX_SIZE}x{_MAX_SIZE}; got {self.size!r}"
            )
        object.__setattr__(self, "size", (size[0] + size[0] % 2, size[1] + size[1] % 2))
        if not isinstance(self.range, str) and not _is_pair(self.range, numbers.Real):
            raise TensortapError(f"range must be a rule or a pair like (-1, 1), got {self.range!r}")
        RangeFollower(self.range)
        if self.legend_color is not None:
            try:
                parse_color(self.legend_color)
            except TensortapError as error:
                raise TensortapError(f"legend_color: {error}") from None

    @property
    def colors(self) -> FilmTheme:
        """Return the theme, with the chosen color of the text."""
        if self.legend_color is None:
            return THEME
        ink = parse_color(self.legend_color)
        return THEME._replace(ink=ink, dim=mixed(ink, THEME.background, 0.35))


class FrameLayout(NamedTuple):
    """Sizes of text and margins of a frame in pixels, and its colors."""

    size: tuple[int, int]
    colors: FilmTheme
    margin: int
    title: int
    text: int
    small: int
    header: int
    footer: int

    @classmethod
    def of(cls, style: Style) -> FrameLayout:
        """Return a layout that is readable at the size."""
        width, height = style.size
        unit = min(width / 640, height / 480)
        title, text = max(13, round(18 * unit)), max(11, round(12.5 * unit))
        small, margin = max(10, round(11.5 * unit)), max(8, round(16 * unit))
        header = round(margin * 0.8 + title * 1.3 + text * 1.45 + margin * 0.45)
        footer = round(text * 1.7 + margin * 0.9)
        return cls(style.size, style.colors, margin, title, text, small, header, footer)

    @property
    def room(self) -> Box:
        """Return where the picture goes, between the heading and the statistics."""
        width, height = self.size
        return Box(self.margin, self.header, width - self.margin, height - self.footer)

    @property
    def bar_width(self) -> int:
        """Return the width of a color bar with its numbers."""
        return round(self.small * 5.6)

    def plot_box(self, right: int) -> Box:
        """Return where a plot goes, with room for its axes."""
        room = self.room
        left = room.left + round(self.small * 3.8)
        return Box(left, room.top, right, room.bottom - self.small - 9)

    def most_ticks(self, plot: Box, across: int = 7) -> tuple[int, int]:
        """Return how many ticks have room across and up; `across` is letters per tick."""
        wide = max(10 * across - 20, self.small * across)
        return max(2, plot.width // wide), max(2, plot.height // (self.small * 4 + 12))


class RangeFollower:
    """The range of a film, frame by frame.

    ``"follow"`` grows at once, so that no value lies outside, and shrinks slowly, so that nothing
    flickers. A pair is used as it is.

    >>> follower = RangeFollower("follow")
    >>> follower.next(0.0, 1.0), follower.next(0.0, 2.0), follower.next(0.0, 1.0)
    ((0.0, 1.0), (0.0, 2.0), (0.0, 1.9))
    """

    def __init__(self, rule: str | Range) -> None:
        if isinstance(rule, str):
            if rule != "follow":
                raise TensortapError(f"range must be 'follow' or a pair like (-1, 1), got {rule!r}")
        elif len([*rule]) != 2 or not all(map(math.isfinite, rule)) or rule[0] >= rule[1]:
            raise TensortapError(f"range must be two numbers, the smaller first; got {rule}")
        self._rule = rule
        self._low, self._high = math.nan, math.nan

    def next(self, low: float, high: float, *, symmetric: bool = False) -> Range:
        """Return the range for a frame with values from `low` to `high` (NaN: none is finite).

        `symmetric` puts zero in the middle.
        """
        if not isinstance(self._rule, str):
            return float(self._rule[0]), float(self._rule[1])
        if not math.isnan(low):
            low, high = max(low, -_LARGEST), min(high, _LARGEST)
            if symmetric:
                low, high = -max(abs(low), abs(high)), max(abs(low), abs(high))
            if math.isnan(self._low):
                self._low, self._high = low, high
            else:
                self._low = min(low, self._low + (low - self._low) * _SHRINK)
                self._high = max(high, self._high + (high - self._high) * _SHRINK)
        if math.isnan(self._low):
            return (-1.0, 1.0) if symmetric else (0.0, 1.0)
        return nonempty(self._low, self._high)


def ticks(low: float, high: float, most: int) -> Ticks:
    """Return at most so many round numbers within a range, with their texts."""
    if not low < high or most < 1:
        return []
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for factor in (1, 2, 2.5, 5, 10, 20):
        step = factor * power
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            break
    # enough digits to tell neighbors apart
    largest = max(abs(first), abs(last)) or 1
    digits = min(15, max(3, math.ceil(math.log10(largest)) + 2))
    return [(i * step, number(i * step, digits)) for i in range(first, last + 1)]


def cell_ticks(count: int, most: int) -> list[int]:
    """Return at most so many round positions along an axis of `count` cells."""
    step = 1
    while (count - 1) // step + 1 > max(most, 1):
        step = step * 2 if str(step)[0] != "2" else step * 5 // 2
    return list(range(0, count, step))


def as_shares(limits: Range, found: Ticks) -> Ticks:
    """Return ticks at shares of a range instead of values."""
    low, high = limits
    return [((value - low) / (high - low), words) for value, words in found]
