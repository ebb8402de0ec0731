"""A frame in memory, and what is drawn on it: text, boxes, lines, dots.

Letters and digits are drawn by Pillow once and kept as masks, so that a number that changes with
every frame costs a few small copies.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tensortap.errors import MissingExtra
from tensortap.viz.colors import Rgb, packed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ROUND = 4  # how much finer curves are drawn than they are shown


def need_pillow() -> Any:
    """Pillow, or what to install."""
    try:
        import PIL.Image
    except ImportError:
        raise MissingExtra("films need Pillow: pip install 'tensortap[video]'") from None
    return PIL.Image


class Canvas:
    """Pixels of red, green, blue and 255; `pixels` is the same memory, a number a pixel."""

    def __init__(self, width: int, height: int, color: Rgb) -> None:
        import numpy as np

        self.background = color
        self.pixels = np.full((height, width), packed(color), np.uint32)
        self.bytes: NDArray[np.uint8] = self.pixels.view(np.uint8).reshape(height, width, 4)

    @property
    def width(self) -> int:
        """In pixels."""
        return int(self.pixels.shape[1])

    @property
    def height(self) -> int:
        """In pixels."""
        return int(self.pixels.shape[0])

    def copy_from(self, other: Canvas) -> None:
        """Become the same picture."""
        self.pixels[:] = other.pixels

    def fill(self, left: int, top: int, right: int, bottom: int, color: Rgb) -> None:
        """A box, its right and bottom edges not included."""
        self.pixels[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)] = packed(color)

    def frame(self, left: int, top: int, right: int, bottom: int, color: Rgb) -> None:
        """A thin line around a box."""
        for edge in (top - 1, bottom):
            self.fill(left - 1, edge, right + 1, edge + 1, color)
        for edge in (left - 1, right):
            self.fill(edge, top - 1, edge + 1, bottom + 1, color)

    def stamp(self, mask: NDArray[np.uint8], left: int, top: int, color: Rgb) -> None:
        """Paint through a mask of 0 to 255; what lies outside is cut off."""
        import numpy as np

        height, width = mask.shape
        y0, x0 = max(top, 0), max(left, 0)
        y1, x1 = min(top + height, self.height), min(left + width, self.width)
        if y0 >= y1 or x0 >= x1:
            return
        part = mask[y0 - top : y1 - top, x0 - left : x1 - left, None]
        under = self.bytes[y0:y1, x0:x1, :3]
        share = part.astype(np.float32) * np.float32(1 / 255)
        under[:] = under + (np.array(color, np.float32) - under) * share + np.float32(0.5)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: int,
        color: Rgb,
        align: str = "left",
        *,
        moving: bool = False,
    ) -> int:
        """A line of text whose middle is at height `y`; how wide it is.

        `moving` is for what changes from frame to frame, on the bare background: digits of one
        width, so that nothing wobbles, put together from single letters that are kept as pixels.
        """
        if moving:
            letters = _letters(text, size, color, self.background)
            width = int(letters.shape[1])
            self.paste(letters, _left(x, width, align), round(y - letters.shape[0] / 2))
        else:
            mask = _still(text, size)
            width = int(mask.shape[1])
            self.stamp(mask, _left(x, width, align), round(y - mask.shape[0] / 2), color)
        return width

    def paste(self, pixels: NDArray[np.uint32], left: int, top: int) -> None:
        """Put pixels over what is there; what lies outside is cut off."""
        height, width = pixels.shape
        y0, x0 = max(top, 0), max(left, 0)
        y1, x1 = min(top + height, self.height), min(left + width, self.width)
        if y0 < y1 and x0 < x1:
            part = pixels[y0 - top : y1 - top, x0 - left : x1 - left]
            self.pixels[y0:y1, x0:x1] = part

    def badge(self, x: float, y: float, text: str, size: int, color: Rgb) -> int:
        """Text on a coloured pill, right edge at `x`; how wide it is."""
        mask = _moving(text, size)
        width, height = badge_width(text, size), round(size * 1.55)
        left, top = round(x) - width, round(y - height / 2)
        self.stamp(_pill(width, height), left, top, color)
        bright = 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]
        ink = (10, 10, 14) if bright > 140 else (255, 255, 255)
        self.stamp(mask, left + size // 2, round(y - mask.shape[0] / 2), ink)
        return width

    def curve(
        self, xs: Sequence[float], ys: Sequence[float], width: float, color: Rgb, opacity: float = 1
    ) -> None:
        """A smooth line through points."""
        import numpy as np

        if len(xs) < 2:
            return
        left, top = int(min(xs) - width - 1), int(min(ys) - width - 1)
        across, down = int(max(xs) + width + 2) - left, int(max(ys) + width + 2) - top
        image_module = need_pillow()
        from PIL import ImageDraw

        image = image_module.new("L", (across * _ROUND, down * _ROUND))
        points = [((x - left) * _ROUND, (y - top) * _ROUND) for x, y in zip(xs, ys, strict=True)]
        ImageDraw.Draw(image).line(
            points, fill=round(255 * opacity), width=max(1, round(width * _ROUND)), joint="curve"
        )
        self.stamp(np.asarray(image.reduce(_ROUND)), left, top, color)

    def dots(
        self, xs: NDArray[Any], ys: NDArray[Any], radius: float, colors: NDArray[np.uint8]
    ) -> None:
        """A disc at each point, later ones over earlier ones; what lies outside is left out."""
        import numpy as np

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


def badge_width(text: str, size: int) -> int:
    """How wide a badge is."""
    return moving_width(text or " ", size) + size


def _left(x: float, width: int, align: str) -> int:
    return round(x - {"left": 0.0, "middle": width / 2, "right": width}[align])


@functools.cache
def _font(size: int) -> Any:
    need_pillow()
    from PIL import ImageFont

    return ImageFont.load_default(size)


def _drawn(text: str, size: int) -> NDArray[np.uint8]:
    """A text as a mask, of the same height whatever its letters are."""
    import numpy as np
    from PIL import Image, ImageDraw

    font = _font(size)
    width = max(1, round(font.getlength(text)))
    image = Image.new("L", (width, round(size * 1.3)))
    ImageDraw.Draw(image).text((0, size * 0.98), text, fill=255, font=font, anchor="ls")
    return np.asarray(image)


_still = functools.lru_cache(maxsize=2048)(_drawn)


@functools.cache
def _digit_width(size: int) -> int:
    return max(int(_drawn(digit, size).shape[1]) for digit in "0123456789")


@functools.lru_cache(maxsize=2048)
def _placed(letter: str, size: int) -> NDArray[np.uint8]:
    """A letter as a mask; digits are all as wide as the widest."""
    import numpy as np

    mask = _drawn(letter, size)
    missing = _digit_width(size) - mask.shape[1]
    if letter not in "0123456789" or missing <= 0:
        return mask
    return np.pad(mask, ((0, 0), (missing // 2, missing - missing // 2)))


@functools.lru_cache(maxsize=4096)
def _colored(letter: str, size: int, color: Rgb, background: Rgb) -> NDArray[np.uint32]:
    import numpy as np

    share = _placed(letter, size)[..., None] / 255
    mixed = np.array(background) + (np.array(color) - np.array(background)) * share
    return packed(np.rint(mixed).astype(np.uint8))


def _letters(text: str, size: int, color: Rgb, background: Rgb) -> NDArray[np.uint32]:
    import numpy as np

    return np.concatenate(
        [_colored(letter, size, color, background) for letter in text or " "], axis=1
    )


def _moving(text: str, size: int) -> NDArray[np.uint8]:
    import numpy as np

    return np.concatenate([_placed(letter, size) for letter in text or " "], axis=1)


def moving_width(text: str, size: int) -> int:
    """How wide a text would be that changes from frame to frame."""
    return sum(int(_placed(letter, size).shape[1]) for letter in text)


@functools.lru_cache(maxsize=2048)
def text_width(text: str, size: int) -> int:
    """How wide a text would be."""
    return max(1, round(float(_font(size).getlength(text))))


def fitted(text: str, size: int, width: float) -> str:
    """A text that is no wider: its middle is left out where it would be.

    >>> fitted("model.layers.0.attention", 12, 500), fitted("", 12, 5)
    ('model.layers.0.attention', '')
    """
    text = "".join(c if c.isprintable() else " " for c in text[:2000])
    if text_width(text, size) <= width:
        return text
    low, high = 0, len(text)
    while low < high:  # the longest that fits
        kept = (low + high + 1) // 2
        if text_width(_without_middle(text, kept), size) <= width:
            low = kept
        else:
            high = kept - 1
    return _without_middle(text, low)


def _without_middle(text: str, kept: int) -> str:
    ahead = kept // 3
    return f"{text[:ahead]}…{text[len(text) - (kept - ahead) :]}" if kept else "…"


@functools.lru_cache(maxsize=256)
def _pill(width: int, height: int) -> NDArray[np.uint8]:
    import numpy as np
    from PIL import Image, ImageDraw

    image = Image.new("L", (width * _ROUND, height * _ROUND))
    box = (0, 0, width * _ROUND - 1, height * _ROUND - 1)
    ImageDraw.Draw(image).rounded_rectangle(box, radius=height * _ROUND // 2, fill=255)
    return np.asarray(image.reduce(_ROUND))


@functools.lru_cache(maxsize=16)
def _disc(radius: float) -> NDArray[np.uint8]:
    import numpy as np

    reach = int(np.ceil(radius))
    fine = (np.arange((2 * reach + 1) * _ROUND) + 0.5) / _ROUND - reach - 0.5
    inside = fine[:, None] ** 2 + fine[None, :] ** 2 <= radius**2
    side = 2 * reach + 1
    share = inside.reshape(side, _ROUND, side, _ROUND).mean(axis=(1, 3))
    mask: NDArray[np.uint8] = np.rint(share * 255).astype(np.uint8)
    return mask
