"""A frame in memory, and drawing on it: text, boxes, lines, dots, headings, axes, color bars.

Pillow draws each letter once. Letters are kept as pixels, so that a number that changes with every
frame costs only a few small copies.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tensortap.core.errors import MissingExtra
from tensortap.core.record import Kind, Summary
from tensortap.rooms.figures.reals import Range
from tensortap.rooms.films.style import (
    NAN_COLOR,
    NEGINF_COLOR,
    POSINF_COLOR,
    STEPS,
    Box,
    FrameLayout,
    Rgb,
    Ticks,
    cell_ticks,
    packed,
    ticks,
)
from tensortap.text.tensors import number

if TYPE_CHECKING:
    from tensortap.rooms.films.pictures import FrameContent


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


def draw_heading(canvas: Canvas, layout: FrameLayout, content: FrameContent, note: str) -> None:
    """Write name, facts about the tensor, the note of the picture and the message."""
    colors, margin = layout.colors, layout.margin
    right, room = canvas.width - margin, canvas.width - 2 * margin
    y = margin * 0.8 + layout.title * 0.65
    name_room = room - text_width("step 0,000,000", layout.title) - margin
    name = fitted(content.record.name, layout.title, name_room)
    canvas.text(margin, y, name, layout.title, colors.ink)
    y += layout.title * 0.65 + layout.text * 0.8
    message = fitted(content.message, layout.text, room * 0.4)
    width = canvas.text(right, y, message, layout.text, colors.accent, "right") if message else 0
    record = content.record
    kind = record.kind.value.replace("_", " ").lower() if record.kind is not Kind.VALUE else ""
    shape = str(list(content.shape)) if content.shape else ""
    ranks = max(record.world_size, record.rank + 1)
    rank = f"rank {record.rank} of {ranks}" if ranks > 1 else ""
    facts = (f"{shape} {content.dtype}".strip(), note, kind, rank, content.device)
    words = fitted(" · ".join(filter(None, facts)), layout.text, room - width - margin)
    canvas.text(margin, y, words, layout.text, colors.dim)


def draw_statistics(canvas: Canvas, layout: FrameLayout, content: FrameContent) -> None:
    """Write the step, statistics of the finite values, and counts of the others."""
    colors, size, right = layout.colors, layout.text, canvas.width - layout.margin
    y = layout.margin * 0.8 + layout.title * 0.65
    step = f"{content.record.step:,}"
    step_width = canvas.text(right, y, step, layout.title, colors.ink, "right")
    canvas.text(right - step_width - layout.title * 0.35, y, "step", size, colors.dim, "right")
    summary = content.summary
    if summary is None:
        return
    y = canvas.height - layout.footer / 2 - layout.margin * 0.1
    x = float(right)
    for name, count, color in (
        ("-Inf", summary.neginfs, NEGINF_COLOR),
        ("+Inf", summary.posinfs, POSINF_COLOR),
        ("NaN", summary.nans, NAN_COLOR),
    ):
        if count:
            words = f"{name} {count:,}" if count < 100_000 else f"{name} {number(count)}"
            x -= canvas.text(x, y, words, size, color, "right") + size
    room = x - layout.margin
    texts = _statistics(summary)
    text = next((each for each in texts if text_width(each, size) <= room), "")
    canvas.text(layout.margin, y, text, size, colors.ink)


def _statistics(summary: Summary) -> list[str]:
    """Return texts with statistics, from most to least detailed."""
    if not summary.finite:
        return ["nothing is finite" if summary.count else "empty"]
    if summary.count == 1:
        return [number(summary.min, 6), number(summary.min)]
    low, high, mean, std = map(number, (summary.min, summary.max, summary.mean, summary.std))
    ends = f"{low} … {high}"
    return [
        f"min {low}   max {high}   mean {mean}   std {std}", f"{ends}   mean {mean}", ends,
    ]  # fmt: skip


def draw_color_bar(
    canvas: Canvas, layout: FrameLayout, box: Box, pixels: NDArray[np.uint32], limits: Range
) -> None:
    """Draw a color bar right of a box, the largest value on top, with round numbers."""
    right = min(layout.room.right, box.right + layout.bar_width + layout.small)
    left = right - layout.bar_width + round(layout.small * 1.3)
    bar = Box(left, box.top, left + round(layout.small * 1.1), box.bottom)
    steps = np.linspace(STEPS - 1, 0, bar.height).round().astype(np.int64)
    canvas.pixels[bar.top : bar.bottom, bar.left : bar.right] = pixels[steps][:, None]
    low, high = limits
    for value, words in ticks(low, high, max(2, bar.height // (layout.small * 3))):
        y = bar.bottom - 1 - (value - low) / (high - low) * (bar.height - 1)
        canvas.fill(bar.right, round(y), bar.right + 3, round(y) + 1, layout.colors.dim)
        canvas.text(bar.right + 6, y, words, layout.small, layout.colors.dim)


def draw_cell_axes(canvas: Canvas, layout: FrameLayout, box: Box, rows: int, columns: int) -> None:
    """Draw a line around a box, with row numbers on its left and column numbers below."""
    canvas.frame(*box, layout.colors.line)
    dim, small = layout.colors.dim, layout.small
    for row in cell_ticks(rows, max(1, box.height // (small * 3))):
        y = box.top + (row + 0.5) * box.height / rows
        canvas.fill(box.left - 4, int(y), box.left - 1, int(y) + 1, dim)
        canvas.text(box.left - 7, y, str(row), small, dim, "right")
    for column in cell_ticks(columns, max(1, box.width // (small * 5))):
        x = box.left + (column + 0.5) * box.width / columns
        canvas.fill(int(x), box.bottom + 1, int(x) + 1, box.bottom + 4, dim)
        canvas.text(x, box.bottom + 5 + small * 0.65, str(column), small, dim, "middle")


def draw_plot_axes(
    canvas: Canvas, layout: FrameLayout, box: Box, *, across: Ticks, up: Ticks
) -> None:
    """Draw a panel with thin lines; ticks are at shares of the axes."""
    colors, small = layout.colors, layout.small
    canvas.fill(*box, colors.panel)
    for share, words in up:
        y = round(box.bottom - 1 - share * (box.height - 1))
        canvas.fill(box.left, y, box.right, y + 1, colors.line)
        canvas.text(box.left - 6, y, words, small, colors.dim, "right")
    for share, words in across:
        x = round(box.left + share * (box.width - 1))
        canvas.fill(x, box.bottom, x + 1, box.bottom + 3, colors.dim)
        y = box.bottom + 5 + round(small * 0.65)
        canvas.text(x, y, words, small, colors.dim, "middle")
