"""Filters and channels as tiles."""

from __future__ import annotations

import numpy as np

from tensortap.rooms.figures.colors import NAN_COLOR, color_table
from tensortap.rooms.watch.films.frames import Painter
from tensortap.rooms.watch.films.style import Style
from tests.watch.films.filming import near, record


def tiles(x, **style):
    painter = Painter(Style(mode="grid", range=(0, 1), colormap="grey", **style))
    frame = painter.draw(record(x))[..., :3]
    picture = painter._pictures["grid"]
    return frame, picture._tiles, picture.note


def test_draws_one_tile_per_filter():
    x = np.zeros((6, 2, 3, 3), np.float32)
    x[4, 1, 0, 2] = 1.0
    frame, found, note = tiles(x)
    assert [index for index, _ in found] == list(range(12))
    assert note == "12 tiles of 3x3"
    white = near(frame, color_table("grey")[-1], 0)
    for index, box in found:
        tile = white[box.top : box.bottom, box.left : box.right]
        assert tile.any() == (index == 9)
    box = found[9][1]
    rows, columns = np.nonzero(white[box.top : box.bottom, box.left : box.right])
    assert rows.max() < box.height / 3 + 1
    assert columns.min() > box.width * 2 / 3 - 1


def test_tiles_stay_apart_and_inside():
    for shape in (
        (64, 3, 5, 5),
        (7, 40, 30),
        (2, 300, 400),
        (512, 512, 3, 3),
        (10, 784),
        (3, 9, 1),
    ):
        frame, found, _ = tiles(np.zeros(shape, np.float32))
        taken = np.zeros(frame.shape[:2], int)
        for _, box in found:
            taken[box.top : box.bottom, box.left : box.right] += 1
            assert 0 <= box.left < box.right <= 640
            assert 0 <= box.top < box.bottom <= 480
        assert taken.max() == 1


def test_notes_tiles_without_room():
    _, found, note = tiles(np.zeros((256, 256, 3, 3), np.float32))
    indices = [index for index, _ in found]
    assert note == f"{len(indices):,} of 65,536 tiles of 3x3"
    assert indices[0] == 0
    assert indices[-1] > 65_000


def test_shows_a_nan_in_a_large_tile():
    x = np.zeros((4, 2000, 2000), np.float32)
    x[2, 1999, 0] = np.nan
    frame, found, _ = tiles(x)
    box = found[2][1]
    assert near(frame[box.top : box.bottom, box.left : box.right], NAN_COLOR, 0).any()
