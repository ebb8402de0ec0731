"""Filters and channels as tiles."""

from __future__ import annotations

import numpy as np
import pytest

from tensortap.rooms.watch.films.frames import Painter
from tensortap.rooms.watch.films.style import Style
from tensortap.text.colors import NAN_COLOR, color_table
from tests.watch.films.filming import near, record


def mosaic(x):
    """Return the pixels of all tiles, and the note."""
    painter = Painter(Style(mode="grid", range=(0, 1), colormap="grey"))
    frame = painter.draw(record(x))[..., :3]
    picture = painter._pictures["grid"]
    box = picture.box
    assert 0 <= box.left < box.right <= 640
    assert 0 <= box.top < box.bottom <= 480
    return frame[box.top : box.bottom, box.left : box.right], picture.note


def test_draws_one_tile_per_filter():
    x = np.zeros((6, 2, 3, 3), np.float32)
    x[4, 1, 0, 2] = 1.0
    frame, note = mosaic(x)
    assert note == "12 tiles of 3x3"
    rows, columns = np.nonzero(near(frame, color_table("grey")[-1], 0))
    high, wide = (frame.shape[0] + 1) / 3, (frame.shape[1] + 1) / 4  # tile 9 of 3 x 4
    assert rows.min() == 2 * high
    assert rows.max() < 2 * high + high / 3
    assert columns.max() == 2 * wide - 2
    assert columns.min() >= wide + (wide - 1) * 2 / 3


@pytest.mark.parametrize(
    "shape", [(64, 3, 5, 5), (7, 40, 30), (2, 300, 400), (512, 512, 3, 3), (10, 784), (3, 9, 1)]
)
def test_draws_tiles_of_any_shape(shape):
    mosaic(np.zeros(shape, np.float32))


def test_notes_tiles_without_room():
    _, note = mosaic(np.zeros((256, 256, 3, 3), np.float32))
    assert note.endswith(" of 65,536 tiles of 3x3")


def test_shows_a_nan_in_a_large_tile():
    x = np.zeros((4, 2000, 2000), np.float32)
    x[2, 1999, 0] = np.nan
    frame, _ = mosaic(x)
    rows, columns = np.nonzero(near(frame, NAN_COLOR, 0))
    assert len(rows) == 1
    assert rows[0] == frame.shape[0] - 1
    assert columns[0] == 0
