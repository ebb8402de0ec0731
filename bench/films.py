"""Rows on films: drawing against matplotlib, and drawing with encoding against encoding alone."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from bench.harness import Row, in_turns
from bench.runs import _folder

_SIZE = (640, 480)
_FRAMES = 24


def _tensors():
    """Return the 256×256 tensors of a film: moving hills with some noise."""
    import numpy as np

    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:256, 0:256] / 255
    found = []
    for i in range(_FRAMES):
        at = i / _FRAMES
        hills = np.exp(-((x - at) ** 2 + (y - 0.4) ** 2) * 20)
        hills -= 0.6 * np.exp(-((x - 0.7) ** 2 + (y - 1 + at) ** 2) * 30)
        found.append((hills + 0.02 * rng.standard_normal((256, 256))).astype(np.float32))
    return found


def _records():
    from tensortap.core.record import Kind, Record, TensorData

    return [
        Record(
            "blocks.3.attn.wq", Kind.WEIGHT, step, 0, step, 0, 1, 0,
            value=TensorData("numpy", "float32", x.shape, x.tobytes()),
        )
        for step, x in enumerate(_tensors())
    ]  # fmt: skip


def _ours(mode):
    """Return frames per second, with statistics, legend and color bar."""
    from tensortap.rooms.films.frames import Painter
    from tensortap.rooms.films.style import Style

    painter = Painter(Style(size=_SIZE, mode=mode))
    records = _records()

    def run() -> float:
        start = time.perf_counter()
        for record in records:
            painter.draw(record)
        return len(records) / (time.perf_counter() - start)

    return run


def _figure(projection=None):
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(_SIZE[0] / 100, _SIZE[1] / 100), dpi=100)
    return figure, figure.add_subplot(projection=projection)


def _pixels(figure):
    import numpy as np

    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())


def _imshow():
    """Redraw image and title of one figure, without new axes or color bar."""
    figure, axes = _figure()
    tensors = _tensors()
    image = axes.imshow(tensors[0])
    figure.colorbar(image)
    title = axes.set_title("")

    def run() -> float:
        start = time.perf_counter()
        for step, x in enumerate(tensors):
            image.set_data(x)
            title.set_text(f"blocks.3.attn.wq, step {step}, mean {x.mean():.3g}")
            _pixels(figure)
        return len(tensors) / (time.perf_counter() - start)

    return run


def _plot_surface():
    """Draw as matplotlib does by default: 50 × 50 faces for 256 × 256 values."""
    import numpy as np

    figure, axes = _figure("3d")
    tensors = _tensors()[::6]
    y, x = np.mgrid[0:256, 0:256]

    def run() -> float:
        start = time.perf_counter()
        for step, z in enumerate(tensors):
            axes.clear()
            axes.plot_surface(x, y, z, cmap="viridis")
            axes.set_title(f"blocks.3.attn.wq, step {step}, mean {z.mean():.3g}")
            _pixels(figure)
        return len(tensors) / (time.perf_counter() - start)

    return run


def _note(ours: list[float]) -> str:
    return f"{sorted(ours)[len(ours) // 2]:.0f} frames/s"


def film_image() -> list[Row]:
    a, b = in_turns(5, _ours("image"), _imshow())
    return [Row("frames/s of 256×256 at 640×480, image ÷ matplotlib imshow redrawn", 5, False, a, b,
                unit="frames/s", note=_note(a))]  # fmt: skip


def film_surface() -> list[Row]:
    a, b = in_turns(5, _ours("surface"), _plot_surface())
    return [Row("the same, surface ÷ matplotlib plot_surface", 20, False, a, b,
                unit="frames/s", note=_note(a))]  # fmt: skip


def film_encoded() -> list[Row]:
    """Compare `Recorder` with the same encoder fed with finished frames."""
    import tensortap as tap
    from tensortap.rooms.films.frames import Painter
    from tensortap.rooms.films.style import Style
    from tensortap.rooms.films.video import VideoWriter

    folder = Path(_folder())
    records = _records()
    painter = Painter(Style(size=_SIZE))
    ready = [painter.draw(record).copy() for record in records]
    count = iter(range(10**6))

    def ours() -> float:
        start = time.perf_counter()
        with tap.Recorder(folder / str(next(count)), size=_SIZE) as recorder:
            for record in records:
                recorder(record)
        return len(records) / (time.perf_counter() - start)

    def base() -> float:
        start = time.perf_counter()
        writer = VideoWriter(folder / f"{next(count)}.mp4", "mp4", _SIZE, 20)
        for frame in ready:
            writer.write(frame)
        writer.close()
        return len(records) / (time.perf_counter() - start)

    try:
        a, b = in_turns(9, ours, base)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [Row("the same, drawn and encoded ÷ PyAV encoding finished frames", 0.5, False, a, b,
                unit="frames/s", note=_note(a))]  # fmt: skip


ROWS = (film_image, film_surface, film_encoded)
