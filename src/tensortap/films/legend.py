"""The legend of a picture: heading, statistics, axes and color bar."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tensortap.films.canvas import Canvas, badge_width, fitted, moving_width, text_width
from tensortap.films.picture import FrameContent
from tensortap.films.scales import Ticks, cell_ticks, ticks
from tensortap.films.style import Box, FrameLayout
from tensortap.record import Kind, Summary
from tensortap.text.tensors import number
from tensortap.viz.colors import NAN_COLOR, NEGINF_COLOR, POSINF_COLOR, STEPS, Rgb
from tensortap.viz.reals import Range

Numbers = list[tuple[str, str]]  # labels and values

_LEVELS = 7
_MESSAGE, _MESSAGE_AT_LEAST = 0.45, 0.2  # shares of the second line for a long message


def draw_heading(
    canvas: Canvas, layout: FrameLayout, content: FrameContent, note: str, aside: str = ""
) -> None:
    """Write name, facts about the tensor, the note of the picture and the message."""
    if not layout.header:
        return
    colors, margin = layout.colors, layout.margin
    room = canvas.width - 2 * margin
    y = margin * 0.8 + layout.title * 0.65
    name_room = room - text_width("step 0,000,000", layout.title) - margin
    name = fitted(content.record.name, layout.title, name_room)
    canvas.text(margin, y, name, layout.title, colors.ink)
    y += layout.title * 0.65 + layout.text * 0.8
    words, message = second_line(content, note, aside, layout.text, room, margin)
    if message:
        canvas.text(canvas.width - margin, y, message, layout.text, colors.accent, "right")
    canvas.text(margin, y, words, layout.text, colors.dim)


def second_line(
    content: FrameContent, note: str, aside: str, size: int, room: float, gap: float
) -> tuple[str, str]:
    """Return facts and message that fit; the least important facts give way first."""
    message = fitted(content.message, size, room) if content.message else ""
    wanted = text_width(message, size) + gap if message else 0.0
    facts = _facts(content, note, aside)
    words = ""
    for level in range(_LEVELS):
        words = " · ".join(text for text, levels in facts if text and level in levels)
        if text_width(words, size) + min(wanted, room * _MESSAGE) <= room:
            break
    else:
        words = fitted(words, size, room - min(wanted, room * _MESSAGE_AT_LEAST))
    left = room - text_width(words, size) - gap
    return words, fitted(message, size, left) if message else ""


def _facts(content: FrameContent, note: str, aside: str) -> list[tuple[str, range]]:
    """Return facts about a tensor, each with the levels of brevity that include it."""
    record, shape = content.record, f"{list(content.shape)}" if content.shape else ""
    kind = record.kind.value.replace("_", " ").lower() if record.kind is not Kind.VALUE else ""
    size = max(record.world_size, record.rank + 1)
    *first, last = aside.split(" · ")
    return [
        (kind, range(4)),
        (f"{shape} {content.dtype}".strip(), range(6 if shape else _LEVELS)),
        (shape, range(6, _LEVELS)),
        (f"rank {record.rank} of {size}" if size > 1 else "", range(3)),
        (content.device, range(2)),
        (note, range(_LEVELS)),
        *((each, range(5)) for each in first),
        (last, range(1)),
    ]


def draw_statistics(canvas: Canvas, layout: FrameLayout, content: FrameContent) -> None:
    """Write the step, statistics of the finite values, and counts of the others."""
    if not layout.header:
        return
    colors, size, right = layout.colors, layout.text, canvas.width - layout.margin
    y = layout.margin * 0.8 + layout.title * 0.65
    step = f"{content.record.step:,}"
    width = canvas.text(right, y, step, layout.title, colors.ink, "right", moving=True)
    canvas.text(right - width - layout.title * 0.35, y, "step", size, colors.dim, "right")
    if content.summary is None:
        return
    y = canvas.height - layout.footer / 2 - layout.margin * 0.1
    x = float(right)
    for words, color in _badges(content.summary, size, right - layout.margin):
        x -= canvas.badge(x, y, words, size, color) + size * 0.5
    left = float(layout.margin)
    shown, column = _arranged(_statistics(content.summary), size, x - left)
    for label, value in shown:
        start = left
        if label:
            left += canvas.text(left, y, label, size, colors.dim) + size * 0.45
        if value:
            left += canvas.text(left, y, value, size, colors.ink, moving=True)
        left = max(left + size * 0.8, start + column)


def _statistics(summary: Summary) -> list[Numbers]:
    """Return statistics to show, from most to least detailed."""
    if not summary.count:
        return [[("empty", "")]]
    if not summary.finite:
        return [[("nothing is finite", "")], [("none finite", "")]]
    if summary.count == 1:
        return [[("value", number(summary.min, 6))], [("", number(summary.min))]]
    names = ("min", "max", "mean", "std")
    low, high, mean, std = [(name, number(getattr(summary, name))) for name in names]
    ends = ("", f"{low[1]} … {high[1]}")
    return [[low, high, mean, std], [low, high, mean], [ends, mean], [ends], []]


def _arranged(choices: list[Numbers], size: int, room: float) -> tuple[Numbers, float]:
    """Return the first choice that fits, and the width of its columns.

    Columns have a fixed width if possible, so that numbers do not move from frame to frame.
    """
    steady = text_width("-0.00000", size)
    for place, shown in enumerate(choices):
        widths = [
            (text_width(label, size) + size * 0.45 if label else 0.0)
            + (max(moving_width(value, size), steady) if value else 0.0)
            + size * 0.8
            for label, value in shown
        ]
        if place == 0 and max(size * 9.4, *widths) * len(shown) <= room:
            return shown, size * 9.4
        if sum(widths) <= room:
            return shown, 0.0
    return [], 0.0


def _badges(summary: Summary, size: int, room: float) -> list[tuple[str, Rgb]]:
    """Return counts of values that are not finite, shortened where there is no room."""
    counts = (
        ("-Inf", summary.neginfs, NEGINF_COLOR),
        ("+Inf", summary.posinfs, POSINF_COLOR),
        ("NaN", summary.nans, NAN_COLOR),
    )
    badges = [(f"{name} {n:,}", color) for name, n, color in counts if n]
    if sum(badge_width(words, size) + size * 0.5 for words, _ in badges) > room:
        badges = [(f"{name} {short_count(n)}", color) for name, n, color in counts if n]
    return badges


def short_count(count: int, digits: int = 3) -> str:
    """Return a count with a unit if it has more digits.

    >>> short_count(999), short_count(56_789_000), short_count(1_500_000, 5)
    ('999', '56.8M', '1.5M')
    """
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size and count >= 10**digits:
            return f"{count / size:.3g}{unit}"
    return str(count)


def draw_color_bar(
    canvas: Canvas, layout: FrameLayout, box: Box, pixels: NDArray[np.uint32]
) -> Box:
    """Draw a color bar right of a box, the largest value on top; return where it is."""
    if not layout.header:
        return box
    right = min(layout.room.right, box.right + layout.bar_width + layout.small)
    left = right - layout.bar_width + round(layout.small * 1.3)
    bar = Box(left, box.top, left + round(layout.small * 1.1), box.bottom)
    steps = np.linspace(STEPS - 1, 0, bar.height).round().astype(np.int64)
    canvas.pixels[bar.top : bar.bottom, bar.left : bar.right] = pixels[steps][:, None]
    return bar


def draw_bar_ticks(
    canvas: Canvas, layout: FrameLayout, bar: Box, limits: Range, labels: Ticks | None = None
) -> None:
    """Write labels beside a color bar, by default round numbers."""
    if not layout.header:
        return
    low, high = limits
    if labels is None:
        labels = ticks(low, high, max(2, bar.height // (layout.small * 3)))
    for value, words in labels:
        y = bar.bottom - 1 - (value - low) / (high - low) * (bar.height - 1)
        canvas.fill(bar.right, round(y), bar.right + 3, round(y) + 1, layout.colors.dim)
        canvas.text(bar.right + 6, y, words, layout.small, layout.colors.dim, moving=True)


def draw_cell_axes(canvas: Canvas, layout: FrameLayout, box: Box, rows: int, columns: int) -> None:
    """Draw a line around a box, with row numbers on its left and column numbers below."""
    if not layout.header:
        return
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
        if layout.header:
            canvas.text(box.left - 6, y, words, small, colors.dim, "right", moving=True)
    for share, words in across:
        x = round(box.left + share * (box.width - 1))
        canvas.fill(x, box.bottom, x + 1, box.bottom + 3, colors.dim)
        if layout.header:
            y = box.bottom + 5 + round(small * 0.65)
            canvas.text(x, y, words, small, colors.dim, "middle", moving=True)
