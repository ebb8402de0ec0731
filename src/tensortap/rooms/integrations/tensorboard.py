"""Export of a run's statistics to TensorBoard: ``run.to_tensorboard("tb")``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensortap.core.errors import MissingExtra, TensortapError
from tensortap.rooms.integrations.curves import ExponentHistogram, curve_points


def export(
    source: Any,
    folder: str | Path,
    *,
    names: str | None = None,
    rank: int | str | None = None,
) -> int:
    """Write a run, or what a tracker has seen, for TensorBoard; return the number of records.

    Scalars are called ``Weight/rm2/blocks.0.wq``, exponents ``Weight/exponents/blocks.0.wq``, a
    metric by its name, a later call within a step ``…/call1``. Rank 0 is in the folder itself,
    the other ranks are runs of their own below it, ``rank1`` and so on. `names` is a regular
    expression. TensorBoard keeps numbers as float32.
    """
    try:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise MissingExtra(
            "the export to TensorBoard needs tensorboard: pip install tensorboard"
        ) from None
    folder = Path(folder)
    if any(folder.glob("events.out.tfevents.*")) or any(folder.glob("rank*/events.out.*")):
        raise TensortapError(f"{folder} already contains events: choose another folder")
    points = curve_points(source, names=names, rank=rank)
    writers: dict[int, Any] = {}
    count = 0
    try:
        for point in points:
            if point.rank not in writers:
                target = folder / f"rank{point.rank}" if point.rank else folder
                writers[point.rank] = EventFileWriter(str(target))
            summary = summary_pb2.Summary()
            for tag, number in point.numbers.items():
                summary.value.add(tag=tag, simple_value=number)
            if point.histogram is not None:
                summary.value.add(tag=point.histogram.tag, histo=_buckets(point.histogram))
            event = event_pb2.Event(wall_time=point.seconds, step=point.step, summary=summary)
            writers[point.rank].add_event(event)
            count += 1
    finally:
        for writer in writers.values():
            writer.close()
    return count


def _buckets(histogram: ExponentHistogram) -> dict[str, Any]:
    """Return a histogram over exponents: 2^n to 2^(n+1) lies between n and n+1."""
    edges, counts = histogram.edges, histogram.counts
    weighted = [(edge + 0.5, count) for edge, count in zip(edges[:-1], counts, strict=True)]
    return {
        "min": edges[0],
        "max": edges[-1],
        "num": sum(counts),
        "sum": sum(middle * count for middle, count in weighted),
        "sum_squares": sum(middle * middle * count for middle, count in weighted),
        "bucket_limit": edges[1:],
        "bucket": counts,
    }
