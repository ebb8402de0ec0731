"""Options for the frames of a film, and the layout of a frame."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

from tensortap.errors import TensortapError
from tensortap.films.scales import RangeFollower
from tensortap.viz.colors import THEMES, FilmTheme, color_table, mixed, parse_color

MODES = ("auto", "image", "surface", "histogram", "pca", "pca_lowrank", "tsne", "grid")
_SMALLEST, _LARGEST = 32, 8192


class Box(NamedTuple):
    """A rectangle in pixels, without its right and bottom edge."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def width(self) -> int:
        """Return the width in pixels."""
        return self.right - self.left

    @property
    def height(self) -> int:
        """Return the height in pixels."""
        return self.bottom - self.top


def check_count(name: str, count: Any, least: int = 1) -> None:
    """Raise unless an option is an integer of at least `least`."""
    if not isinstance(count, numbers.Integral) or int(count) < least:
        raise TensortapError(f"{name} must be an integer of at least {least}, got {count!r}")


def _is_pair(pair: Any, kind: type) -> bool:
    try:
        return len(pair) == 2 and all(isinstance(number, kind) for number in pair)
    except TypeError:
        return False


@dataclasses.dataclass(frozen=True)
class Style:
    """Size, mode, colors and range of frames.

    `symmetric` puts zero in the middle of the colors; None does so once both signs have occurred.
    Everything is checked here, in the user's process, before a frame is drawn in another one.
    """

    size: tuple[int, int] = (640, 480)
    mode: str = "auto"
    colormap: str | Sequence[Any] = "auto"
    range: str | tuple[float, float] = "follow"
    symmetric: bool | None = None
    theme: str = "dark"
    legend_color: str | Sequence[int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise TensortapError(f"mode must be one of {', '.join(MODES)}; got {self.mode!r}")
        if str(self.theme) not in THEMES:
            raise TensortapError(f"theme must be {' or '.join(THEMES)}, got {self.theme!r}")
        size: Any = self.size
        if not _is_pair(size, numbers.Integral) or not (
            _SMALLEST <= min(size) <= max(size) <= _LARGEST
        ):
            raise TensortapError(
                f"size must be width and height, each from {_SMALLEST} to {_LARGEST} pixels; "
                f"got {self.size!r}"
            )
        check_count("seed", self.seed, 0)
        if not isinstance(self.range, str) and not _is_pair(self.range, numbers.Real):
            raise TensortapError(f"range must be a rule or a pair like (-1, 1), got {self.range!r}")
        RangeFollower(self.range)
        if self.colormap != "auto":
            color_table(self.colormap)
        if self.legend_color is not None:
            try:
                parse_color(self.legend_color)
            except TensortapError as error:
                raise TensortapError(f"legend_color: {error}") from None

    @property
    def colors(self) -> FilmTheme:
        """Return the theme, with the chosen color of the text."""
        theme = THEMES[self.theme]
        if self.legend_color is None:
            return theme
        ink = parse_color(self.legend_color)
        return theme._replace(ink=ink, dim=mixed(ink, theme.background, 0.35))


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
        """Return a layout that is readable at the size; a tiny frame has no text.

        >>> FrameLayout.of(Style()).title, FrameLayout.of(Style(size=(64, 48))).header
        (18, 0)
        """
        width, height = style.size
        if width < 160 or height < 120:
            return cls(style.size, style.colors, 2, 0, 0, 0, 0, 0)
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
        return round(self.small * 5.6) if self.header else 0

    def plot_box(self, right: int) -> Box:
        """Return where a plot goes, with room for its axes."""
        room = self.room
        if not self.header:
            return room._replace(right=right)
        left = room.left + round(self.small * 3.8)
        return Box(left, room.top, right, room.bottom - self.small - 9)

    def most_ticks(self, plot: Box, across: int = 7) -> tuple[int, int]:
        """Return how many ticks have room across and up; `across` is letters per tick."""
        wide = max(10 * across - 20, self.small * across)
        return max(2, plot.width // wide), max(2, plot.height // (self.small * 4 + 12))
