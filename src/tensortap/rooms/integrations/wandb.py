"""Export of a run's statistics to wandb files: ``run.to_wandb()``, then ``wandb sync``."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tensortap.core.errors import MissingExtra
from tensortap.rooms.integrations.curves import curve_points


def export(
    source: Any,
    folder: str | Path = ".",
    *,
    project: str = "tensortap",
    name: str | None = None,
    names: str | None = None,
    rank: int | str | None = None,
) -> Path:
    """Write a run, or what a tracker has seen, as a run of wandb; return its folder.

    The folder is below ``folder/wandb``; nothing is uploaded before ``wandb sync``. Keys are those
    of TensorBoard, like ``Weight/rm2/blocks.0.wq``, over ``step``; the keys of ranks other than 0
    begin with ``rank1/`` and so on. While another wandb run is open in the same program, wandb may
    complete the file a moment later.
    """
    if find_spec("wandb") is None:
        raise MissingExtra("the export to wandb needs wandb: pip install wandb")
    points = curve_points(source, names=names, rank=rank)
    folder = Path(folder).absolute()  # wandb's process may have another working directory
    folder.mkdir(parents=True, exist_ok=True)
    path = getattr(source, "path", None)
    name = name or (path.name if isinstance(path, Path) else None)
    with _opened(folder, project, name) as (wandb, run):
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        for (rank, step), group in itertools.groupby(points, lambda p: (p.rank, p.step)):
            prefix = f"rank{rank}/" if rank else ""
            row: dict[str, Any] = {"step": step}
            for point in group:
                row.setdefault("_timestamp", point.seconds)
                row |= {prefix + tag: number for tag, number in point.numbers.items()}
                histogram = point.histogram
                if histogram is not None and len(histogram.counts) <= 512:  # wandb takes no more
                    bins = histogram.counts, histogram.edges
                    row[prefix + histogram.tag] = wandb.Histogram(np_histogram=bins)
            run.log(row)
        return Path(run.dir).parent


@contextlib.contextmanager
def _opened(folder: Path, project: str, name: str | None) -> Iterator[tuple[Any, Any]]:
    """Open a run of wandb that is written to disk only, also if wandb meets an error of its own."""
    before = {key: os.environ.get(key) for key in ("WANDB_ERROR_REPORTING", "WANDB_SERVICE")}
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    import wandb

    try:
        # the training is over: metadata of this process does not belong in the run
        settings = wandb.Settings(
            console="off", disable_code=True, disable_git=True, silent=True, x_disable_meta=True,
            x_disable_stats=True,
        )  # fmt: skip
        with wandb.init(
            project=project, name=name, dir=str(folder), mode="offline", settings=settings,
            reinit="create_new",
        ) as run:  # fmt: skip
            yield wandb, run
    finally:
        del os.environ["WANDB_ERROR_REPORTING"]
        if before["WANDB_ERROR_REPORTING"] is not None:
            os.environ["WANDB_ERROR_REPORTING"] = before["WANDB_ERROR_REPORTING"]
        if before["WANDB_SERVICE"] is None:  # the user has no wandb run open
            wandb.teardown()  # the file is complete once wandb's process has ended
