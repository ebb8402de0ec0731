"""The legend of a picture: heading, statistics, axes and color bar."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tensortap.core.record import Kind, Summary
from tensortap.rooms.figures.colors import NAN_COLOR, NEGINF_COLOR, POSINF_COLOR, STEPS
from tensortap.rooms.figures.reals import Range
from tensortap.rooms.watch.films.canvas import Canvas, fitted, text_width
from tensortap.rooms.watch.films.picture import FrameContent
from tensortap.rooms.watch.films.style import Box, FrameLayout, Ticks, cell_ticks, ticks
from tensortap.text.tensors import number

Numbers = list[tuple[str, str]]  # labels and values


def draw_heading(canvas: Canvas, layout: FrameLayout, content: FrameContent, note: str) -> None:
    """Write name, facts about the tensor, the note of the picture and the message."""
    colors, margin = layout.colors, layout.margin
    room = canvas.width - 2 * margin
    y = margin * 0.8 + layout.title * 0.65
    name_room = room - text_width("step 0,000,000", layout.title) - margin
    name = fitted(content.record.name, layout.title, name_room)
    canvas.text(margin, y, name, layout.title, colors.ink)
    y += layout.title * 0.65 + layout.text * 0.8
    words, message = second_line(content, note, layout.text, room, margin)
    canvas.text(canvas.width - margin, y, message, layout.text, colors.accent, "right")
    canvas.text(margin, y, words, layout.text, colors.dim)


def second_line(
    content: FrameContent, note: str, size: int, room: float, gap: float
) -> tuple[str, str]:
    """Return facts and message that fit: device, rank, kind and dtype give way, in this order."""
    record = content.record
    shape = f"{list(content.shape)}" if content.shape else ""
    kind = record.kind.value.replace("_", " ").lower() if record.kind is not Kind.VALUE else ""
    ranks = max(record.world_size, record.rank + 1)
    rank = f"rank {record.rank} of {ranks}" if ranks > 1 else ""
    facts = [kind, f"{shape} {content.dtype}".strip(), rank, content.device, note]
    wanted = min(text_width(content.message, size) + gap, room * 0.45) if content.message else 0.0
    for place, shorter in ((3, ""), (2, ""), (0, ""), (1, shape or content.dtype)):
        if text_width(_joined(facts), size) + wanted <= room:
            break
        facts[place] = shorter
    words = fitted(_joined(facts), size, room - min(wanted, room * 0.2))
    left = room - text_width(words, size) - gap
    return words, fitted(content.message, size, left) if content.message else ""


def _joined(facts: list[str]) -> str:
    return " · ".join(filter(None, facts))


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
            words = f"{name} {short_count(count, 5)}"
            x -= canvas.badge(x, y, words, size, color) + size * 0.5
    left = float(layout.margin)
    for shown in _statistics(summary):
        widths = [_width_of(label, value, size) for label, value in shown]
        if left + sum(widths) <= x:
            for (label, value), width in zip(shown, widths, strict=True):
                after = canvas.text(left, y, label, size, colors.dim) + size * 0.45 if label else 0
                canvas.text(left + after, y, value, size, colors.ink)
                left += width
            return


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
    return [[low, high, mean, std], [low, high, mean], [ends, mean], [ends]]


def _width_of(label: str, value: str, size: int) -> float:
    """Return the width of a statistic; it varies little, so that the next one stays in place."""
    steady = max(text_width(value, size), text_width("-0.00000", size)) if value else 0.0
    return (text_width(label, size) + size * 0.45 if label else 0.0) + steady + size * 0.8


def short_count(count: int, digits: int) -> str:
    """Return a count with a unit if it has more digits.

    >>> short_count(99_999, 5), short_count(56_789_000, 5), short_count(1_500_000, 5)
    ('99,999', '56.8M', '1.5M')
    """
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size and count >= 10**digits:
            return f"{count / size:.3g}{unit}"
    return f"{count:,}"


def draw_color_bar(
    canvas: Canvas, layout: FrameLayout, box: Box, pixels: NDArray[np.uint32]
) -> Box:
    """Draw a color bar right of a box, the largest value on top; return where it is."""
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
    low, high = limits
    if labels is None:
        labels = ticks(low, high, max(2, bar.height // (layout.small * 3)))
    for value, words in labels:
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
