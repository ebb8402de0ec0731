"""How the frames of a film look: everything that a user may choose, checked once."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

from tensortap.errors import TensortapError
from tensortap.films.scales import Follower
from tensortap.viz.colors import THEMES, FilmTheme, color_table, mixed, parse_color

MODES = ("auto", "image", "surface", "histogram", "pca", "pca_lowrank", "tsne", "grid")
_SMALLEST, _LARGEST = 32, 8192


class Box(NamedTuple):
    """Where something is drawn, in pixels; right and bottom not included."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def width(self) -> int:
        """In pixels."""
        return self.right - self.left

    @property
    def height(self) -> int:
        """In pixels."""
        return self.bottom - self.top


def check_count(name: str, count: Any, least: int = 1) -> None:
    """An option that counts something is a whole number."""
    if not isinstance(count, numbers.Integral) or int(count) < least:
        raise TensortapError(f"{name}={count!r}: it is a whole number, {least} or more")


def _are(pair: Any, kind: type) -> bool:
    """Whether something is two numbers."""
    try:
        return len(pair) == 2 and all(isinstance(number, kind) for number in pair)
    except TypeError:
        return False


@dataclasses.dataclass(frozen=True)
class Style:
    """Size, mode, colours and range of the frames; `symmetric` None is: if both signs occur."""

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
            raise TensortapError(f"mode={self.mode!r}: it is one of {', '.join(MODES)}")
        if self.theme not in THEMES:
            raise TensortapError(f"theme={self.theme!r}: it is {' or '.join(THEMES)}")
        sides: Any = self.size
        if (
            not _are(sides, numbers.Integral)
            or not _SMALLEST <= min(sides) <= max(sides) <= _LARGEST
        ):
            raise TensortapError(
                f"size={self.size}: width and height, each from {_SMALLEST} to {_LARGEST} pixels"
            )
        check_count("seed", self.seed, 0)
        if not isinstance(self.range, str) and not _are(self.range, numbers.Real):
            raise TensortapError(f"range={self.range!r}: a word, or a pair like (-1, 1)")
        # said here, in the user's own process, and not when the first frame is drawn elsewhere
        Follower(self.range)
        if self.colormap != "auto":
            color_table(self.colormap)
        if self.legend_color is not None:
            parse_color(self.legend_color)

    @property
    def colors(self) -> FilmTheme:
        """The theme, in which the legend has the colour that was asked for."""
        theme = THEMES[self.theme]
        if self.legend_color is None:
            return theme
        ink = parse_color(self.legend_color)
        return theme._replace(ink=ink, dim=mixed(ink, theme.background, 0.35))


class Measures(NamedTuple):
    """Sizes of letters and margins, in pixels, for a frame of some size."""

    margin: int
    title: int
    text: int
    small: int
    header: int
    footer: int

    @classmethod
    def of(cls, width: int, height: int) -> Measures:
        """Readable at any size; a frame too small for letters has none.

        >>> Measures.of(640, 480).title, Measures.of(64, 48).header
        (18, 0)
        """
        if width < 160 or height < 120:
            return cls(2, 0, 0, 0, 0, 0)
        unit = min(width / 640, height / 480)
        title, text = max(13, round(18 * unit)), max(11, round(12.5 * unit))
        small, margin = max(10, round(11.5 * unit)), max(8, round(16 * unit))
        header = round(margin * 0.8 + title * 1.3 + text * 1.45 + margin * 0.45)
        return cls(margin, title, text, small, header, round(text * 1.7 + margin * 0.9))

    def room(self, size: tuple[int, int]) -> Box:
        """Where a picture is drawn: between the heading and the figures."""
        width, height = size
        return Box(self.margin, self.header, width - self.margin, height - self.footer)
