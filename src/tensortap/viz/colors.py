"""Colours: maps from numbers to colours that also print and that colour-blind people can read.

A map is drawn through a few anchors in OKLab, where equal steps look equal; its lightness rises
all the way (sequential), or from the middle to both ends alike (diverging), so that a grey copy
still tells more from less. NaN and the infinities have colours that no map comes near.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tensortap.errors import TensortapError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Rgb = tuple[int, int, int]

STEPS = 253  # colours of a map; with the three below, an index is one byte
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


class Theme(NamedTuple):
    """What is around a picture."""

    background: Rgb
    panel: Rgb  # behind a plot
    ink: Rgb  # text that matters
    dim: Rgb  # labels, ticks
    line: Rgb  # axes and grids
    accent: Rgb  # bars, curves, the message


THEMES = {
    "dark": Theme(
        (15, 18, 25), (22, 27, 36), (236, 240, 246), (142, 153, 170), (52, 60, 74), (86, 180, 233)
    ),
    "light": Theme(
        (255, 255, 255), (246, 248, 251), (24, 30, 40), (98, 108, 124), (208, 214, 224),
        (0, 114, 178),
    ),
}  # fmt: skip


def parse_color(color: str | Sequence[int]) -> Rgb:
    """Red, green and blue of ``"#rrggbb"``, of a name that Pillow knows, or of three numbers.

    >>> parse_color("#ff8000"), parse_color("white"), parse_color((1, 2, 3))
    ((255, 128, 0), (255, 255, 255), (1, 2, 3))
    """
    if isinstance(color, str):
        from PIL import ImageColor

        try:
            red, green, blue = ImageColor.getrgb(color)[:3]
        except ValueError:
            raise TensortapError(
                f"no colour is called {color!r}: write '#rrggbb', a name like 'orange', or three "
                "numbers from 0 to 255"
            ) from None
        return red, green, blue
    numbers = tuple(int(part) for part in color)
    if len(numbers) != 3 or not all(0 <= part <= 255 for part in numbers):
        raise TensortapError(f"a colour is three numbers from 0 to 255, not {tuple(color)}")
    return numbers[0], numbers[1], numbers[2]


def mixed(a: Rgb, b: Rgb, share: float) -> Rgb:
    """A colour on the way from one to another.

    >>> mixed((0, 0, 0), (100, 200, 50), 0.5)
    (50, 100, 25)
    """
    red, green, blue = (round(x + (y - x) * share) for x, y in zip(a, b, strict=True))
    return red, green, blue


def table_of(colormap: str | Sequence[Any]) -> NDArray[np.uint8]:
    """The colours of a map, ``(253, 3)``: by its name, or drawn through a list of colours.

    >>> table_of("aurora").shape, table_of(["black", "#ffffff"])[[0, -1]].tolist()
    ((253, 3), [[0, 0, 0], [255, 255, 255]])
    """
    import numpy as np

    if isinstance(colormap, str):
        if colormap not in _ANCHORS:
            raise TensortapError(
                f"no colour map is called {colormap!r}: there are {', '.join(MAPS)}, or a list of "
                "colours"
            )
        return _named(colormap)
    if len(colormap) < 2:
        raise TensortapError("a colour map is drawn through two colours or more")
    rgb = np.array([parse_color(color) for color in colormap], np.float64) / 255
    return _through(_from_rgb(rgb))


@functools.cache
def _named(name: str) -> NDArray[np.uint8]:
    import numpy as np

    lightness, chroma, hue = np.array(_ANCHORS[name], np.float64).T
    angle = np.deg2rad(hue)
    table = _through(np.stack([lightness, chroma * np.cos(angle), chroma * np.sin(angle)], 1))
    table.flags.writeable = False
    return table


def _through(anchors: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Evenly from anchor to anchor, in OKLab."""
    import numpy as np

    at = np.linspace(0, len(anchors) - 1, STEPS)
    lab = np.stack([np.interp(at, np.arange(len(anchors)), part) for part in anchors.T], 1)
    found: NDArray[np.uint8] = np.rint(_to_rgb(lab).clip(0, 1) * 255).astype(np.uint8)
    return found


# Oklab by Björn Ottosson: linear sRGB -> cone responses -> their cube roots -> L, a, b
_CONES = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
_LAB = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)


def _from_rgb(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    import numpy as np

    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    lab: NDArray[np.float64] = np.cbrt(linear @ np.array(_CONES).T) @ np.array(_LAB).T
    return lab


def _to_rgb(lab: NDArray[np.float64]) -> NDArray[np.float64]:
    import numpy as np

    roots = lab @ np.linalg.inv(np.array(_LAB)).T
    linear = (roots**3 @ np.linalg.inv(np.array(_CONES)).T).clip(0, 1)
    rgb: NDArray[np.float64] = np.where(
        linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055
    )
    return rgb


def lightness(rgb: NDArray[np.uint8]) -> NDArray[np.float64]:
    """How light colours look, from 0 to 1: what is left of them in a grey copy.

    >>> import numpy as np
    >>> lightness(np.array([[0, 0, 0], [255, 255, 255]], np.uint8)).round(3).tolist()
    [0.0, 1.0]
    """
    return _from_rgb(rgb / 255)[:, 0]


def packed(rgb: Any) -> NDArray[np.uint32]:
    """Colours as the four bytes of a pixel: red, green, blue, 255.

    >>> import numpy as np
    >>> packed([[1, 2, 3]]).view(np.uint8).tolist()
    [1, 2, 3, 255]
    """
    import numpy as np

    colors = np.asarray(rgb, np.uint8)
    pixels = np.full((*colors.shape[:-1], 4), 255, np.uint8)
    pixels[..., :3] = colors
    return pixels.view(np.uint32)[..., 0]


def pixels_of(table: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """256 pixels: the map, then NaN and the infinities."""
    import numpy as np

    return packed(np.concatenate([table, [NAN_COLOR, POSINF_COLOR, NEGINF_COLOR]]))
