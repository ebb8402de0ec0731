"""Records to film, and films read back."""

from __future__ import annotations

import av
import numpy as np

from tensortap.core.dtypes import name_of
from tensortap.core.record import Kind, Record, TensorData
from tensortap.rooms.films.frames import Painter
from tensortap.rooms.films.style import Style


def record(x, name="x", step=0, kind=Kind.VALUE, rank=0, world_size=1, stats=None, **tags):
    if isinstance(x, np.ndarray):
        value = TensorData("numpy", name_of(x.dtype), x.shape, np.ascontiguousarray(x).tobytes())
    else:
        value = x
    return Record(name, kind, step, 0, step, rank, world_size, 0, value=value, stats=stats,
                  tags=tags)  # fmt: skip


def draw(x, **style):
    """Return one frame as RGB."""
    return Painter(Style(**style)).draw(record(x))[..., :3].copy()


def near(frame, color, within=40):
    """Return where a frame has about this color."""
    return np.abs(frame.astype(int) - np.array(color)).max(axis=-1) <= within


def frames_of(path):
    """Return the pictures of a film, and their times in seconds."""
    with av.open(str(path)) as container:
        found = list(container.decode(video=0))
        return [f.to_ndarray(format="rgb24") for f in found], [float(f.time) for f in found]
