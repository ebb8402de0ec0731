"""What stands around a picture: the heading, the figures below, axes and the colour bar."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from tensortap.record import Kind, Summary
from tensortap.viz.colors import NAN_COLOR, NEGINF_COLOR, POSINF_COLOR, STEPS
from tensortap.viz.films.canvas import Canvas, fitted, text_width
from tensortap.viz.films.look import Look
from tensortap.viz.films.scales import Range, ticks, whole_ticks
from tensortap.viz.films.style import Box, Measures, Style
from tensortap.viz.text import number

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def heading(canvas: Canvas, style: Style, at: Measures, look: Look, note: str) -> None:
    """Name, kind, shape, dtype, rank and device, the note of the picture and the message."""
    if not at.header:
        return
    colors = style.colors
    room = canvas.width - 2 * at.margin
    y = at.margin * 0.8 + at.title * 0.65
    step_room = _step_width(at.title) + at.margin
    canvas.text(at.margin, y, fitted(look.name, at.title, room - step_room), at.title, colors.ink)
    y += at.title * 0.65 + at.text * 0.8
    words = facts(look) + ([note] if note else [])
    message = fitted(look.message, at.text, room * 0.45) if look.message else ""
    if message:
        x = canvas.width - at.margin
        room -= canvas.text(x, y, message, at.text, colors.accent, "right") + at.margin
    canvas.text(at.margin, y, fitted(" · ".join(words), at.text, room), at.text, colors.dim)


def facts(look: Look) -> list[str]:
    """Kind, shape and dtype, rank and device: what is there to say."""
    words = [] if look.kind is Kind.VALUE else [look.kind.value.replace("_", " ").lower()]
    shape = f"[{', '.join(map(str, look.shape))}] " if look.shape else ""
    if look.dtype:
        words.append(f"{shape}{look.dtype}")
    if look.world_size > 1 or look.rank:
        words.append(f"rank {look.rank} of {max(look.world_size, look.rank + 1)}")
    if look.device:
        words.append(look.device)
    return words


@functools.cache
def _step_width(size: int) -> int:
    return text_width("step 0,000,000", size)


def figures(canvas: Canvas, style: Style, at: Measures, look: Look) -> None:
    """The step, what the finite values are, and how many are not finite."""
    if not at.header:
        return
    colors = style.colors
    y = at.margin * 0.8 + at.title * 0.65
    right = canvas.width - at.margin
    width = canvas.text(right, y, f"{look.step:,}", at.title, colors.ink, "right", moving=True)
    canvas.text(right - width - at.title * 0.35, y, "step", at.text, colors.dim, "right")
    y = canvas.height - at.footer / 2 - at.margin * 0.1
    if look.summary is None:
        return
    x = float(right)
    for words, color in _badges(look.summary):
        x -= canvas.badge(x, y, words, at.text, color) + at.text * 0.5
    each = min(at.text * 9.4, (right - at.margin) / 4)
    left = float(at.margin)
    for label, value in _numbers(look.summary):
        if left + each * 0.9 > x:
            break
        after = canvas.text(left, y, label, at.text, colors.dim)
        canvas.text(left + after + at.text * 0.45, y, value, at.text, colors.ink, moving=True)
        left += each


def _numbers(summary: Summary) -> list[tuple[str, str]]:
    if not summary.count:
        return [("empty", "")]
    if not summary.finite:
        return [("nothing is finite", "")]
    if summary.count == 1:
        return [("value", number(summary.min, 6))]
    names = ("min", "max", "mean", "std")
    return [(name, number(getattr(summary, name))) for name in names]


def _badges(summary: Summary) -> list[tuple[str, tuple[int, int, int]]]:
    counts = (
        ("-Inf", summary.neginfs, NEGINF_COLOR),
        ("+Inf", summary.posinfs, POSINF_COLOR),
        ("NaN", summary.nans, NAN_COLOR),
    )
    return [(f"{name} {n:,}", color) for name, n, color in counts if n]


def bar_width(at: Measures) -> int:
    """What a colour bar takes, its numbers included."""
    return round(at.small * 5.6) if at.header else 0


def color_bar(canvas: Canvas, at: Measures, box: Box, pixels: NDArray[np.uint32]) -> Box:
    """The bar along the right edge of a box, largest value on top; where it is."""
    import numpy as np

    width = round(at.small * 1.1)
    left = box.right - bar_width(at) + round(at.small * 1.3)
    bar = Box(left, box.top, left + width, box.bottom)
    steps = np.linspace(STEPS - 1, 0, bar.height).round().astype(np.int64)
    canvas.pixels[bar.top : bar.bottom, bar.left : bar.right] = pixels[steps][:, None]
    return bar


def bar_ticks(canvas: Canvas, style: Style, at: Measures, bar: Box, limits: Range) -> None:
    """The numbers beside a colour bar."""
    colors = style.colors
    low, high = limits
    most = max(2, bar.height // (at.small * 3))
    for value, words in ticks(low, high, most):
        y = bar.bottom - 1 - (value - low) / (high - low) * (bar.height - 1)
        canvas.fill(bar.right, round(y), bar.right + 3, round(y) + 1, colors.dim)
        canvas.text(bar.right + 6, y, words, at.small, colors.dim, moving=True)


def cell_axes(canvas: Canvas, style: Style, at: Measures, box: Box, shape: tuple[int, int]) -> None:
    """Rows and columns, counted from 0, along the left and the lower edge of a box."""
    if not at.header:
        return
    colors = style.colors
    rows, columns = shape
    for row in whole_ticks(rows, max(1, box.height // (at.small * 3))):
        y = box.top + (row + 0.5) * box.height / rows
        canvas.fill(box.left - 4, int(y), box.left - 1, int(y) + 1, colors.dim)
        canvas.text(box.left - 7, y, str(row), at.small, colors.dim, "right")
    for column in whole_ticks(columns, max(1, box.width // (at.small * 5))):
        x = box.left + (column + 0.5) * box.width / columns
        canvas.fill(int(x), box.bottom + 1, int(x) + 1, box.bottom + 4, colors.dim)
        canvas.text(
            x, box.bottom + 5 + at.small * 0.65, str(column), at.small, colors.dim, "middle"
        )


def plot_axes(
    canvas: Canvas,
    style: Style,
    at: Measures,
    box: Box,
    *,
    across: list[tuple[float, str]],
    up: list[tuple[float, str]],
    moving: bool = True,
) -> None:
    """A panel with thin lines: ticks are (share of the way, words)."""
    colors = style.colors
    canvas.fill(*box, colors.panel)
    for share, words in up:
        y = round(box.bottom - 1 - share * (box.height - 1))
        canvas.fill(box.left, y, box.right, y + 1, colors.line)
        if at.header:
            canvas.text(box.left - 6, y, words, at.small, colors.dim, "right", moving=moving)
    for share, words in across:
        x = round(box.left + share * (box.width - 1))
        canvas.fill(x, box.bottom, x + 1, box.bottom + 3, colors.dim)
        if at.header:
            y = box.bottom + 5 + round(at.small * 0.65)
            canvas.text(x, y, words, at.small, colors.dim, "middle", moving=moving)


def shares(limits: Range, found: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Ticks as shares of the way through a range."""
    low, high = limits
    return [((value - low) / (high - low), words) for value, words in found]


def words_in_the_middle(canvas: Canvas, style: Style, at: Measures, box: Box, words: str) -> None:
    """Where there is nothing to draw, why."""
    if at.header:
        x, y = (box.left + box.right) / 2, (box.top + box.bottom) / 2
        text = fitted(words, at.title, box.width)
        canvas.text(x, y, text, at.title, style.colors.dim, "middle")
