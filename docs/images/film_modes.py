"""Draw docs/images/film-modes.png: one frame of each mode.

Run ``python docs/images/film_modes.py`` when the look of frames has changed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from tensortap.core.record import Kind, Record, TensorData
from tensortap.rooms.films.frames import Painter
from tensortap.rooms.films.style import Style

SIZE = (448, 336)
COLUMNS = 3


def record(x: np.ndarray, name: str, step: int) -> Record:
    """Return a record as a source would make it."""
    value = TensorData("numpy", str(x.dtype), x.shape, np.ascontiguousarray(x).tobytes())
    tags = {"message": f"epoch {1 + step // 100}"}
    return Record(name, Kind.VALUE, step, 0, step, 0, 1, 0, value=value, tags=tags)


def films() -> list[tuple[str, str, list[np.ndarray]]]:
    """Return mode, name and tensors of each film."""
    rng = np.random.default_rng(7)
    y, x = np.mgrid[0:128, 0:128] / 127
    hills = np.exp(-((x - 0.3) ** 2 + (y - 0.35) ** 2) * 18)
    hills -= 0.7 * np.exp(-((x - 0.7) ** 2 + (y - 0.62) ** 2) * 26)
    hills += 0.08 * np.sin(13 * x) * np.sin(10 * y)
    noisy = (hills + 0.05 * rng.standard_normal(hills.shape)).astype(np.float32)[::2, ::2]
    noisy[40:42, 12:14] = np.nan
    noisy[9, 50] = np.inf
    values = rng.standard_normal((4, 25, 600)).astype(np.float32)
    centers = rng.standard_normal((5, 24)) * 4
    points = np.concatenate([rng.standard_normal((90, 24)) + center for center in centers])
    return [
        ("image", "image", [noisy]),
        ("surface", "surface", [hills]),
        ("histogram", "histogram", [values * 0.6 - 0.8, values * (1 + 0.2 * np.tanh(values))]),
        ("pca", "pca", [points]),
        ("tsne", "tsne", [points]),
    ]


def main() -> None:
    """Draw the last frame of each film into one sheet."""
    frames = []
    for mode, name, tensors in films():
        painter = Painter(Style(size=SIZE, mode=mode))
        for i, x in enumerate(tensors):
            frame = painter.draw(record(x.astype(np.float32), name, 350 - len(tensors) + i))
        frames.append(Image.fromarray(frame[..., :3].copy()))
    painter = Painter(Style(size=SIZE, mode="surface", theme="light"))
    _, _, (hills,) = films()[1]
    frame = painter.draw(record(hills.astype(np.float32), "surface, theme light", 350))
    frames.append(Image.fromarray(frame[..., :3].copy()))
    gap = 6
    rows = -(-len(frames) // COLUMNS)
    sheet = Image.new(
        "RGB", (COLUMNS * (SIZE[0] + gap) - gap, rows * (SIZE[1] + gap) - gap), (120, 128, 140)
    )
    for i, each in enumerate(frames):
        sheet.paste(each, (i % COLUMNS * (SIZE[0] + gap), i // COLUMNS * (SIZE[1] + gap)))
    target = Path(__file__).with_name("film-modes.png")
    sheet.save(target, optimize=True)


if __name__ == "__main__":
    main()
