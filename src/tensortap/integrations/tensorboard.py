"""The statistics of a run for TensorBoard: ``run.to_tensorboard("tb")``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensortap.errors import MissingExtra, TensortapError
from tensortap.integrations.curves import STATISTICS, Histogram, Point, points


def export(
    source: Any,
    folder: str | Path,
    *,
    names: str | None = None,
    statistics: Sequence[str] = STATISTICS,
    histograms: bool = True,
) -> int:
    """Write a run, or what a tracker has seen, for TensorBoard; how many records it was.

    Scalars go by ``Weight/rm2/blocks.0.wq``, exponents by ``Weight/exponents/blocks.0.wq``, a
    metric by its name, a later call within a step by ``…/call1``. Every rank but the first is
    a run of its own, in a folder ``rank1`` below. `names` is a regular expression, `statistics`
    are those that get a curve. TensorBoard keeps numbers as float32.
    """
    writers = _Writers(Path(folder))
    count = 0
    try:
        for point in points(source, names=names, statistics=statistics, histograms=histograms):
            writers.write(point)
            count += 1
    finally:
        writers.close()
    return count


class _Writers:
    """One event file a rank."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer import event_file_writer
        except ImportError:
            raise MissingExtra(
                "the export to TensorBoard needs tensorboard: pip install tensorboard"
            ) from None
        if any(folder.glob("events.out.tfevents.*")) or any(folder.glob("rank*/events.out.*")):
            raise TensortapError(f"{folder} has events already: choose another folder")
        self._folder = folder
        self._open: Any = event_file_writer.EventFileWriter
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2
        self._writers: dict[int, Any] = {}

    def write(self, point: Point) -> None:
        value = self._summary.Summary.Value
        found = [value(tag=tag, simple_value=number) for tag, number in point.numbers.items()]
        if point.histogram is not None:
            found.append(value(tag=point.histogram.tag, histo=self._histo(point.histogram)))
        summary = self._summary.Summary(value=found)
        event = self._event(wall_time=point.seconds, step=point.step, summary=summary)
        self._writer(point.rank).add_event(event)

    def _writer(self, rank: int) -> Any:
        writer = self._writers.get(rank)
        if writer is None:
            folder = self._folder / f"rank{rank}" if rank else self._folder
            writer = self._writers[rank] = self._open(str(folder))
        return writer

    def _histo(self, histogram: Histogram) -> Any:
        """Over exponents: a value of 2^n to 2^(n+1) is between n and n+1."""
        edges, counts = histogram.edges, histogram.counts
        middles = [edge + 0.5 for edge in edges[:-1]]
        return self._summary.HistogramProto(
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=sum(m * n for m, n in zip(middles, counts, strict=True)),
            sum_squares=sum(m * m * n for m, n in zip(middles, counts, strict=True)),
            bucket_limit=edges[1:],
            bucket=counts,
        )

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
