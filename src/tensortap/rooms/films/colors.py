"""Two color maps that also print in gray and that color-blind people can read.

A map is interpolated between a few anchors. Its lightness rises all the way (sequential) or falls
alike from the middle to both ends (diverging). NaN and the infinities have colors that are far
from every map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.core.errors import TensortapError

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


THEMES = {
    "dark": FilmTheme(
        (15, 18, 25), (22, 27, 36), (236, 240, 246), (142, 153, 170), (52, 60, 74), (86, 180, 233)
    ),
    "light": FilmTheme(
        (255, 255, 255), (246, 248, 251), (24, 30, 40), (98, 108, 124), (208, 214, 224),
        (0, 114, 178),
    ),
}  # fmt: skip


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
