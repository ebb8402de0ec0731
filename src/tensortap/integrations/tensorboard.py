"""Export of a run's statistics to TensorBoard: ``run.to_tensorboard("tb")``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensortap.errors import MissingExtra, TensortapError
from tensortap.integrations.curves import STATISTICS, CurvePoint, ExponentHistogram, curve_points


def export(
    source: Any,
    folder: str | Path,
    *,
    names: str | None = None,
    statistics: Sequence[str] = STATISTICS,
    histograms: bool = True,
) -> int:
    """Write a run, or what a tracker has seen, for TensorBoard; return the number of records.

    Scalars are called ``Weight/rm2/blocks.0.wq``, exponents ``Weight/exponents/blocks.0.wq``, a
    metric by its name, a later call within a step ``…/call1``. Rank 0 is in the folder itself,
    the other ranks are runs of their own below it, ``rank1`` and so on. `names` is a regular
    expression, `statistics` are those that get a curve. TensorBoard keeps numbers as float32.
    """
    writers = _EventFiles(Path(folder))
    count = 0
    try:
        for point in curve_points(
            source, names=names, statistics=statistics, histograms=histograms
        ):
            writers.write(point)
            count += 1
    finally:
        writers.close()
    return count


class _EventFiles:
    """One event file per rank."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer import event_file_writer
        except ImportError:
            raise MissingExtra(
                "the export to TensorBoard needs tensorboard: pip install tensorboard"
            ) from None
        if any(folder.glob("events.out.tfevents.*")) or any(folder.glob("rank*/events.out.*")):
            raise TensortapError(f"{folder} already contains events: choose another folder")
        self._folder = folder
        self._open: Any = event_file_writer.EventFileWriter
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2
        self._writers: dict[int, Any] = {}

    def write(self, point: CurvePoint) -> None:
        value = self._summary.Summary.Value
        values = [value(tag=tag, simple_value=number) for tag, number in point.numbers.items()]
        if point.histogram is not None:
            values.append(value(tag=point.histogram.tag, histo=self._proto(point.histogram)))
        summary = self._summary.Summary(value=values)
        event = self._event(wall_time=point.seconds, step=point.step, summary=summary)
        self._writer(point.rank).add_event(event)

    def _writer(self, rank: int) -> Any:
        writer = self._writers.get(rank)
        if writer is None:
            folder = self._folder / f"rank{rank}" if rank else self._folder
            writer = self._writers[rank] = self._open(str(folder))
        return writer

    def _proto(self, histogram: ExponentHistogram) -> Any:
        """Return a histogram over exponents: 2^n to 2^(n+1) lies between n and n+1."""
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
