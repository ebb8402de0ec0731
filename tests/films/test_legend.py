"""The text around a picture is readable at any size."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tensortap.core.record import Kind
from tensortap.rooms.films.canvas import Canvas
from tensortap.rooms.films.frames import Painter
from tensortap.rooms.films.style import Style
from tests.films.filming import record

LONG = "model.encoder.layers.11.attention.self.query_key_value.weight_quantized.lora_A.default"
RNG = np.random.default_rng(0)
MATRIX = RNG.standard_normal((256, 300)).astype(np.float32)
MATRIX[0, 0], MATRIX[1, 1], MATRIX[2, :200] = np.nan, np.inf, -np.inf
TENSORS = {
    "image": MATRIX,
    "surface": MATRIX,
    "histogram": MATRIX * 1e-7,
    "pca": np.tile(MATRIX[:, :16], (20, 1)),
}


@pytest.fixture
def written(monkeypatch):
    """Record every text that is drawn, with its box."""
    found = []
    text = Canvas.text

    def note_text(self, x, y, words, size, color, align="left"):
        width = text(self, x, y, words, size, color, align)
        left = x - {"left": 0, "middle": width / 2, "right": width}[align]
        found.append((words, left, y - size * 0.45, left + width, y + size * 0.45))
        return width

    monkeypatch.setattr(Canvas, "text", note_text)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", TENSORS)
@pytest.mark.parametrize("size", [(160, 120), (640, 480), (300, 900), (1000, 200)])
def test_texts_neither_overlap_nor_leave_the_frame(written, mode, size):
    width, height = size
    tags = {"kind": Kind.GRADIENT, "rank": 3, "world_size": 8, "device": "cuda:3"}
    for name, message in (("w", "epoch 3"), (LONG, "warm up of the learning rate, second try")):
        written.clear()
        painter = Painter(Style(size=size, mode=mode))
        painter.draw(record(TENSORS[mode], name, 12_345, message=message, **tags))
        boxes = [box for box in written if box[0].strip()]
        assert len(boxes) > 5
        for words, left, top, right, bottom in boxes:
            assert left >= 0, words
            assert top >= 0, words
            assert right <= width, words
            assert bottom <= height, words
        for one, other in itertools.combinations(boxes, 2):
            apart = one[3] <= other[1] or other[3] <= one[1]
            assert apart or one[4] <= other[2] or other[4] <= one[2], (one, other)


def test_shows_statistics_and_counts_at_320_by_240(written):
    Painter(Style(size=(320, 240))).draw(record(MATRIX))
    words = " ".join(box[0] for box in written)
    assert "mean" in words
    for each in ("NaN 1", "+Inf 1", "-Inf 200"):
        assert each in words
    assert f"{np.nanmax(MATRIX[3:]):.3g}"[:4] in words
