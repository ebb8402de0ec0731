"""A frame in memory, and drawing on it: text, boxes, lines, dots.

Pillow draws each letter once. Letters are kept as pixels, so that a number that changes with every
frame costs only a few small copies.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.core.errors import MissingExtra
from tensortap.rooms.films.colors import Rgb, packed

try:
    from PIL import Image, ImageDraw, ImageFont
except ImportError:
    raise MissingExtra.of("films need Pillow", "video") from None

Mask = NDArray[np.uint8]


_FINE = 4  # curves are drawn so many times larger, then reduced
_DIGITS = "0123456789"
_ALIGN = {"left": 0.0, "middle": 0.5, "right": 1.0}


class Canvas:
    """Pixels of red, green, blue and 255; `pixels` is the same memory, one number per pixel."""

    def __init__(self, width: int, height: int, color: Rgb) -> None:
        self.width, self.height = width, height
        self.background = color
        self.pixels = np.full((height, width), packed(color), np.uint32)
        self.bytes: NDArray[np.uint8] = self.pixels.view(np.uint8).reshape(height, width, 4)

    def fill(self, left: int, top: int, right: int, bottom: int, color: Rgb) -> None:
        """Fill a box, without its right and bottom edge."""
        self.pixels[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)] = packed(color)

    def frame(self, left: int, top: int, right: int, bottom: int, color: Rgb) -> None:
        """Draw a thin line around a box."""
        for edge in (top - 1, bottom):
            self.fill(left - 1, edge, right + 1, edge + 1, color)
        for edge in (left - 1, right):
            self.fill(edge, top - 1, edge + 1, bottom + 1, color)

    def _clipped(
        self, shape: tuple[int, ...], left: int, top: int
    ) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
        """Return where in the frame, and in a picture at a position, the two overlap."""
        bottom, right = min(top + shape[0], self.height), min(left + shape[1], self.width)
        y, x = max(top, 0), max(left, 0)
        inside = slice(y, max(y, bottom)), slice(x, max(x, right))
        return inside, (
            slice(y - top, max(y, bottom) - top),
            slice(x - left, max(x, right) - left),
        )

    def stamp(self, mask: Mask, left: int, top: int, color: Rgb) -> None:
        """Paint a color through a mask of 0 to 255."""
        inside, part = self._clipped(mask.shape, left, top)
        under = self.bytes[inside][..., :3]
        share = mask[part][..., None].astype(np.float32) * np.float32(1 / 255)
        under[:] = under + (np.array(color, np.float32) - under) * share + np.float32(0.5)

    def text(
        self, x: float, y: float, text: str, size: int, color: Rgb, align: str = "left"
    ) -> int:
        """Write a line of text on the plain background, its middle at height `y`; return its width.

        All digits have the same width, so that a number does not move when it changes.
        """
        pixels = [_letter_pixels(c, size, color, self.background) for c in text or " "]
        line = np.concatenate(pixels, axis=1)
        height, width = line.shape
        at = round(x - _ALIGN[align] * width), round(y - height / 2)
        inside, part = self._clipped(line.shape, *at)
        self.pixels[inside] = line[part]
        return int(width)

    def curve(self, xs: Sequence[float], ys: Sequence[float], width: float, color: Rgb) -> None:
        """Draw a smooth line through points."""
        if len(xs) < 2:
            return
        left, top = int(min(xs) - width - 1), int(min(ys) - width - 1)
        across, down = int(max(xs) + width + 2) - left, int(max(ys) + width + 2) - top
        image = Image.new("L", (across * _FINE, down * _FINE))
        points = [((x - left) * _FINE, (y - top) * _FINE) for x, y in zip(xs, ys, strict=True)]
        ImageDraw.Draw(image).line(
            points, fill=255, width=max(1, round(width * _FINE)), joint="curve"
        )
        self.stamp(np.asarray(image.reduce(_FINE)), left, top, color)

    def dots(
        self, xs: NDArray[Any], ys: NDArray[Any], radius: float, colors: NDArray[np.uint8]
    ) -> None:
        """Draw a disc at each point that lies inside, later ones over earlier ones."""
        mask = _disc(radius)
        reach = mask.shape[0] // 2
        column, row = np.rint(xs).astype(np.int64), np.rint(ys).astype(np.int64)
        inside = (column >= reach) & (column < self.width - reach)
        inside &= (row >= reach) & (row < self.height - reach)
        column, row, colors = column[inside], row[inside], colors[inside].astype(np.float32)
        for dy in range(-reach, reach + 1):
            for dx in range(-reach, reach + 1):
                share = np.float32(mask[dy + reach, dx + reach] / 255)
                if share:
                    under = self.bytes[row + dy, column + dx, :3]
                    mixed = under + (colors - under) * share + np.float32(0.5)
                    self.bytes[row + dy, column + dx, :3] = mixed.astype(np.uint8)


_font = functools.cache(ImageFont.load_default)


@functools.lru_cache(maxsize=2048)
def _letter_mask(letter: str, size: int) -> Mask:
    """Draw a letter as a mask whose height does not depend on it; digits have the same width."""
    font = _font(size)
    alike = _DIGITS if letter in _DIGITS else letter
    width = max(1, *(round(font.getlength(each)) for each in alike))
    image = Image.new("L", (width, round(size * 1.3)))
    at = ((width - font.getlength(letter)) // 2, size * 0.98)
    ImageDraw.Draw(image).text(at, letter, fill=255, font=font, anchor="ls")
    return np.asarray(image)


@functools.lru_cache(maxsize=4096)
def _letter_pixels(letter: str, size: int, color: Rgb, background: Rgb) -> NDArray[np.uint32]:
    share = _letter_mask(letter, size)[..., None] / 255
    mixed = np.array(background) + (np.array(color) - np.array(background)) * share
    return packed(np.rint(mixed).astype(np.uint8))


def text_width(text: str, size: int) -> int:
    """Return the width of a text in pixels."""
    return sum(int(_letter_mask(letter, size).shape[1]) for letter in text)


def fitted(text: str, size: int, width: float) -> str:
    """Shorten a text in its middle, with an ellipsis, to fit a width.

    >>> fitted("model.layers.0.attention", 12, 500), fitted("", 12, 5)
    ('model.layers.0.attention', '')
    """
    text = "".join(c if c.isprintable() else " " for c in text[:2000])
    if text_width(text, size) <= width:
        return text

    def without_middle(kept: int) -> str:
        ahead = kept // 3
        return f"{text[:ahead]}…{text[len(text) - (kept - ahead) :]}" if kept else "…"

    # how many letters fit
    kept = bisect.bisect_right(
        range(1, len(text)), width, key=lambda kept: text_width(without_middle(kept), size)
    )
    return without_middle(kept)


@functools.lru_cache(maxsize=16)
def _disc(radius: float) -> Mask:
    reach = int(np.ceil(radius))
    fine = (np.arange((2 * reach + 1) * _FINE) + 0.5) / _FINE - reach - 0.5
    inside = fine[:, None] ** 2 + fine[None, :] ** 2 <= radius**2
    side = 2 * reach + 1
    share = inside.reshape(side, _FINE, side, _FINE).mean(axis=(1, 3))
    mask: Mask = np.rint(share * 255).astype(np.uint8)
    return mask
