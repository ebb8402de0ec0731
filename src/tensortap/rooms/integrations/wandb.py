"""Export of a run's statistics to wandb files: ``run.to_wandb()``, then ``wandb sync``."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tensortap.core.errors import MissingExtra
from tensortap.rooms.integrations.curves import STATISTICS, ExponentHistogram, curve_points

_MAX_BINS = 512  # of wandb


def export(
    source: Any,
    folder: str | Path = ".",
    *,
    project: str = "tensortap",
    name: str | None = None,
    names: str | None = None,
    statistics: Sequence[str] = STATISTICS,
    histograms: bool = True,
    rank: int | str | None = None,
) -> Path:
    """Write a run, or what a tracker has seen, as a run of wandb; return its folder.

    The folder is below ``folder/wandb``; nothing is uploaded before ``wandb sync``. Keys are those
    of TensorBoard, like ``Weight/rm2/blocks.0.wq``, over ``step``; the keys of ranks other than 0
    begin with ``rank1/`` and so on. While another wandb run is open in the same program, wandb may
    complete the file a moment later.
    """
    points = curve_points(
        source, names=names, statistics=statistics, histograms=histograms, rank=rank
    )
    folder = Path(folder).absolute()  # wandb's process may have another working directory
    folder.mkdir(parents=True, exist_ok=True)
    with _quiet(), _opened(folder, project, name or _name(source)) as (wandb, run):
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        for (rank, step), group in itertools.groupby(points, lambda p: (p.rank, p.step)):
            prefix = f"rank{rank}/" if rank else ""
            row: dict[str, Any] = {"step": step}
            for point in group:
                row.setdefault("_timestamp", point.seconds)
                row |= {prefix + tag: number for tag, number in point.numbers.items()}
                if point.histogram is not None:
                    bins = _limited(point.histogram, _MAX_BINS)
                    row[prefix + point.histogram.tag] = wandb.Histogram(np_histogram=bins)
            run.log(row)
        return Path(run.dir).parent


def _name(source: Any) -> str | None:
    path = getattr(source, "path", None)
    return path.name if isinstance(path, Path) else None


def _limited(histogram: ExponentHistogram, most: int) -> tuple[list[int], list[int]]:
    """Return counts and edges, with neighbors added up where there are too many.

    >>> _limited(ExponentHistogram("x", -3, [1, 2, 3]), 2)
    ([3, 3], [-3, -1, 0])
    """
    width = -(-len(histogram.counts) // most)
    starts = range(0, len(histogram.counts), width)
    counts = [sum(histogram.counts[start : start + width]) for start in starts]
    edges = histogram.edges
    return counts, [*(edges[start] for start in starts), edges[-1]]


@contextlib.contextmanager
def _opened(folder: Path, project: str, name: str | None) -> Iterator[tuple[Any, Any]]:
    try:
        import wandb
    except ImportError:
        raise MissingExtra("the export to wandb needs wandb: pip install wandb") from None
    # the training is over: metadata of this process does not belong in the run
    settings = wandb.Settings(
        console="off", disable_code=True, disable_git=True, silent=True, x_disable_meta=True,
        x_disable_stats=True,
    )  # fmt: skip
    ours = "WANDB_SERVICE" not in os.environ  # the user has no wandb run open
    run = wandb.init(
        project=project, name=name, dir=str(folder), mode="offline", settings=settings,
        reinit="create_new",
    )  # fmt: skip
    try:
        with run:
            yield wandb, run
    finally:
        if ours:
            wandb.teardown()  # the file is complete once wandb's process has ended


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep wandb from reporting its own errors over the network."""
    key = "WANDB_ERROR_REPORTING"
    before = os.environ.get(key)
    os.environ[key] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before
