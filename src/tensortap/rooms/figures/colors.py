"""Color maps that also print in gray and that color-blind people can read.

A map is interpolated between a few anchors in OKLab, where equal steps look equal. Its lightness
rises all the way (sequential) or falls alike from the middle to both ends (diverging). NaN and
the infinities have colors that are far from every map.
"""

from __future__ import annotations

import functools
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

# (lightness, chroma, hue in degrees) in OKLCh
_ANCHORS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "aurora": (
        (0.24, 0.12, 312), (0.38, 0.12, 290), (0.50, 0.11, 245), (0.62, 0.12, 185),
        (0.74, 0.15, 150), (0.86, 0.18, 118), (0.95, 0.16, 105),
    ),
    "slate": (
        (0.24, 0.07, 262), (0.38, 0.06, 262), (0.52, 0.015, 250), (0.66, 0.045, 100),
        (0.80, 0.10, 96), (0.93, 0.15, 98),
    ),
    "ember": (
        (0.17, 0.04, 295), (0.32, 0.11, 310), (0.47, 0.14, 350), (0.62, 0.145, 30),
        (0.78, 0.16, 68), (0.95, 0.09, 100),
    ),
    "grey": ((0.18, 0.0, 0), (0.96, 0.0, 0)),
    "polar": (
        (0.36, 0.13, 262), (0.53, 0.13, 254), (0.72, 0.09, 242), (0.88, 0.035, 235),
        (0.965, 0.003, 120), (0.88, 0.045, 75), (0.72, 0.125, 62), (0.53, 0.13, 50),
        (0.36, 0.095, 42),
    ),
}  # fmt: skip
SEQUENTIAL, DIVERGING = "aurora", "polar"
MAPS = tuple(sorted(_ANCHORS))


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


def color_table(colormap: str | Sequence[Any]) -> NDArray[np.uint8]:
    """Return the ``(253, 3)`` colors of a map, given by name or by a list of colors.

    >>> color_table("aurora").shape, color_table(["black", "#ffffff"])[[0, -1]].tolist()
    ((253, 3), [[0, 0, 0], [255, 255, 255]])
    """
    if isinstance(colormap, str):
        if colormap not in _ANCHORS:
            raise TensortapError(
                f"unknown colormap {colormap!r}: use {', '.join(MAPS)}, or a list of colors"
            )
        return _named(colormap)
    if not hasattr(colormap, "__len__") or len(colormap) < 2:
        raise TensortapError(
            f"colormap must be a name or at least two colors, got {colormap!r:.80}"
        )
    rgb = np.array([parse_color(color) for color in colormap], np.float64) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return _interpolated(np.cbrt(linear @ _CONES.T) @ _LAB.T)


@functools.cache
def _named(name: str) -> NDArray[np.uint8]:
    lightness, chroma, hue = np.array(_ANCHORS[name], np.float64).T
    angle = np.deg2rad(hue)
    table = _interpolated(np.stack([lightness, chroma * np.cos(angle), chroma * np.sin(angle)], 1))
    table.flags.writeable = False
    return table


# Oklab by Björn Ottosson: linear sRGB → cone responses → their cube roots → L, a, b
_CONES = np.array([
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
])  # fmt: skip
_LAB = np.array([
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
])  # fmt: skip


def _interpolated(anchors: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return evenly spaced sRGB colors along anchors in OKLab."""
    at = np.linspace(0, len(anchors) - 1, STEPS)
    lab = np.stack([np.interp(at, np.arange(len(anchors)), part) for part in anchors.T], 1)
    linear = ((lab @ np.linalg.inv(_LAB).T) ** 3 @ np.linalg.inv(_CONES).T).clip(0, 1)
    rgb = np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055)
    table: NDArray[np.uint8] = np.rint(rgb.clip(0, 1) * 255).astype(np.uint8)
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
