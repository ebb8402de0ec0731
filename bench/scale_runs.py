"""Runs of many ranks, written by several processes with the writer that training uses.

python -m bench.scale_runs runs/large --ranks 1024 --steps 100 --names 50
"""

from __future__ import annotations

import argparse
import multiprocessing
import pathlib
import time
from typing import Any

KINDS = ("Weight", "Activation", "Weight_Gradient")
SHAPE = (4096, 4096)
ODD_RANK, ODD_STEP = 3, 0.6  # a rank whose gradients are too large from this part of the run on
LATE_RANK = 5  # a rank that is behind by a tenth of the steps


def mesh_of(ranks: int) -> tuple[int, int]:
    """Return the sizes of the mesh: up to eight ranks are tensor parallel."""
    tensor = min(8, ranks)
    return ranks // tensor, tensor


def names_of(count: int) -> list[str]:
    """Return names of layers as a transformer has them."""
    parts = ("attn.wq", "attn.wk", "attn.wv", "attn.wo", "mlp.up", "mlp.down")
    return [f"blocks.{i // 6}.{parts[i % 6]}" for i in range(count)]


def heads_of(rank: int, ranks: int, names: int) -> tuple[Any, ...]:
    """Return the records of a step without their statistics: three kinds in turn."""
    from tensortap.core.record import Kind, Record, Shard

    data, tensor = mesh_of(ranks)
    offset = rank % tensor * (SHAPE[0] // tensor)
    local = (SHAPE[0] // tensor, SHAPE[1])
    shard = Shard(SHAPE, (offset, 0), ("R", "S(0)"))
    tags = {
        "mesh": f"dp={rank // tensor}/{data} tp={rank % tensor}/{tensor}",
        "placements": "R S(0)",
    }
    heads = []
    for number, name in enumerate(names_of(names)):
        kind = Kind(KINDS[number % len(KINDS)])
        is_output = kind is Kind.ACTIVATION
        heads.append(Record(
            name if is_output else f"{name}.weight", kind, 0, 0, 0, rank, ranks, 0, "", "float32",
            local, None if is_output else shard, None, None, None, {} if is_output else tags,
        ))  # fmt: skip
    return tuple(heads)


def statistics_of(random: Any, own: Any, count: int, factor: float) -> Any:
    """Return plausible statistics of `count` tensors: `own` numbers are in those of activations."""
    import numpy as np

    from tensortap.stats.columns import SummaryColumns

    size = np.exp2(-np.arange(count) % 7) * (1 + 0.02 * random.standard_normal(count)) * factor
    is_own = np.arange(count) % len(KINDS) == KINDS.index("Activation")
    size = np.where(is_own, size * (1 + 0.01 * own.standard_normal(count)), size)
    counts = np.zeros((5, count), np.int64)
    counts[0] = SHAPE[0] * SHAPE[1] // 8
    figures = np.stack([
        -4 * size, 4 * size, 0.01 * size, size, 0.8 * size, 4 * size, 1e-6 * size, size,
        1.3 * size, 2 * size,
    ])  # fmt: skip
    bins = random.integers(1, 1000, (count, 24))
    bins[is_own] += own.integers(0, 9, (int(is_own.sum()), 24))
    return SummaryColumns(
        counts.tobytes(), figures.tobytes(), np.full(count, -20, np.int32).tobytes(),
        (np.arange(count + 1, dtype=np.int32) * 24).tobytes(), bins.tobytes(),
    )  # fmt: skip


def write_rank(run: str, rank: int, ranks: int, steps: int, names: int, clean: bool) -> None:
    """Write the steps of a rank; in a `clean` run, replicas agree."""
    import numpy as np

    from tensortap.capture.queue import Queue
    from tensortap.capture.ticket import Ticket
    from tensortap.core.record import Kind, Record
    from tensortap.runs.sink import StoreSink
    from tensortap.stats.columns import RecordColumns

    sink = Queue(StoreSink(pathlib.Path(run), rank), budget=1 << 30, overflow="block", name="run")
    heads, width = heads_of(rank, ranks, names), names + 1
    # replicas of a shard have the same statistics: the numbers depend on the place in the mesh
    random = np.random.default_rng(rank % mesh_of(ranks)[1])
    own = np.random.default_rng(1000 + rank)
    for step in range(steps):
        if rank == LATE_RANK and step >= 0.9 * steps:
            break
        wrong = not clean and rank == ODD_RANK and step >= ODD_STEP * steps
        seqs = range(step * width, step * width + names)
        stats = statistics_of(random, own, names, 1.5 if wrong else 1.0)
        sink.write(
            RecordColumns(heads, step, seqs, rank, ranks, time.time_ns(), stats), Ticket(1), 0
        )
        loss = Record("loss", Kind.METRIC, step, 0, seqs.stop, rank, ranks, time.time_ns(),
                      value=3.0 / (1 + step) + 0.01 * rank / ranks)  # fmt: skip
        sink.write(loss, Ticket(1), 0)
    sink.close(60)


def write_run(
    folder: pathlib.Path, ranks: int, steps: int, names: int, *, clean: bool = False
) -> pathlib.Path:
    """Write a finished run with two processes, each taking one rank after the other."""
    from tensortap.runs.folders import end_run, make_run

    run = make_run(folder, ranks)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        jobs = [(str(run), rank, ranks, steps, names, clean) for rank in range(ranks)]
        pool.starmap(write_rank, jobs, chunksize=8)
    end_run(run)
    return run


def main() -> None:
    """Write a run as the command line says, and print its folder."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale_runs", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="the folder of runs to write into")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--names", type=int, default=50, help="tensors of a step")
    parser.add_argument("--clean", action="store_true", help="no rank with other gradients")
    options = parser.parse_args()
    size = options.ranks, options.steps, options.names
    print(write_run(options.folder, *size, clean=options.clean))


if __name__ == "__main__":
    main()
