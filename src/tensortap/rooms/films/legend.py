"""The legend of a picture: heading, statistics, axes and color bar."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tensortap.core.record import Kind, Summary
from tensortap.rooms.figures.reals import Range
from tensortap.rooms.films.canvas import Canvas, fitted, text_width
from tensortap.rooms.films.colors import NAN_COLOR, NEGINF_COLOR, POSINF_COLOR, STEPS
from tensortap.rooms.films.style import Box, FrameLayout, Ticks, cell_ticks, ticks
from tensortap.text.tensors import number

if TYPE_CHECKING:
    from tensortap.rooms.films.pictures import FrameContent


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
