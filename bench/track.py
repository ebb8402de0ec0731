"""Rows on tracked training: GPTs of several sizes, everything tracked into a run."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import time
import types
from collections.abc import Iterator

from bench.harness import Row, in_turns
from bench.runs import _folder, _no_server


def _gpt(*size: int):
    import torch

    from bench.gpt import Training

    torch.set_num_threads(2)
    training = Training(*size)
    for _ in range(3):
        training.step()
    return training


def _tracked(
    every: int, rounds: int, steps: int, *size: int, **options
) -> tuple[list[float], list[float], str]:
    import tensortap as tap

    _no_server()
    folder = _folder()
    training = _gpt(*size)
    try:
        tap.init(folder)
        before = tap.receipt().tracked
        cold: list[float] = []

        def ours() -> float:
            options["every"] = every
            with tap.track(training.model, training.optimizer, **options) as tracker:
                start = time.perf_counter()
                for _ in range(steps):
                    tracker.step(loss=training.step())
                    cold.append(time.perf_counter() - start)
                return (time.perf_counter() - start) / steps

        def base() -> float:
            start = time.perf_counter()
            for _ in range(steps):
                training.step()
            return (time.perf_counter() - start) / steps

        a, b = in_turns(rounds, ours, base)
        assert tap.flush(60)
        receipt = tap.receipt()
        assert not receipt.dropped, receipt
        tap.finish()
        seen = (receipt.tracked - before) // rounds // -(-steps // every)
        step = sorted(b)[len(b) // 2]
        note = (
            f"{seen} tensors per step of {step * 1e3:.0f} ms; the very first {cold[0] / step:.1f}"
        )
        return a, b, note
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def gpt() -> list[Row]:
    a, b, note = _tracked(1, 11, 2)
    return [Row("step of a 6-layer GPT, all tracked ÷ untracked", 1.35, True, a, b, note=note)]


def gpt_every_10() -> list[Row]:
    a, b, note = _tracked(10, 5, 10)
    return [Row("the same with every=10 ÷ untracked", 1.05, True, a, b, note=note)]


def _beside(
    rounds: int, steps: int, ours: dict[str, object], base: dict[str, object] | None, *size: int
) -> list[list[float]]:
    """Return the seconds of some steps of two equal trainings, in turns.

    Each has one tracker with these options for all rounds, so only the first round is cold; None
    stands for no tracker.
    """
    import tensortap as tap

    _no_server()
    folder = _folder()

    def steps_with(tracked, options):
        training = _gpt(*size)
        arguments = training.model, training.optimizer
        tracker = (
            None if options is None else tracked.enter_context(tap.track(*arguments, **options))
        )

        def run() -> float:
            start = time.perf_counter()
            for _ in range(steps):
                loss = training.step()
                if tracker is not None:
                    tracker.step(loss=loss)
            return time.perf_counter() - start

        return run

    try:
        tap.init(folder)
        with contextlib.ExitStack() as tracked:
            found = in_turns(rounds, steps_with(tracked, ours), steps_with(tracked, base))
        tap.finish()
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def analyses() -> list[Row]:
    """Measure all analyses of the model; what tracking costs without them is part of it."""
    a, b = _beside(7, 10, {"every": 10, "analyses": True}, None)
    note = f"10 steps of {statistics.median(b) * 100:.0f} ms"
    return [Row("the same with every=10, analyses=True ÷ untracked", 1.05, True, a, b, note=note)]


def health_rules() -> list[Row]:
    """Measure the rules over training steps alone; no tensor is recorded."""
    from tensortap.rooms.health.rules import RULES

    off: dict[str, object] = {"kind": ()}
    with_rules = {**off, "alerts": list(RULES)}
    a, b = _beside(25, 10, with_rules, {**off, "alerts": False}, 4, 128, 8, 64)
    note = f"{len(RULES)} rules, 10 steps of {statistics.median(b) * 100:.0f} ms"
    return [Row("steps with rules over what they do ÷ without", 1.01, True, a, b, note=note)]


class KernelTime:
    """The seconds that the kernel of statistics takes."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._batches = []

    @property
    def seconds(self) -> float:
        return self._seconds + sum(batch.kernel_ns for batch in self._batches) / 1e9

    def _timed(self, function):
        def call(*args):
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                self._seconds += time.perf_counter() - start

        return call

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        from tensortap.stats import summarize

        kernel = summarize.kernel

        def make_batch():
            self._batches.append(kernel.SummaryBatch())
            return self._batches[-1]

        timed = types.SimpleNamespace(**vars(kernel))
        timed.SummaryBatch, timed.summarize_many = make_batch, self._timed(kernel.summarize_many)
        timed.summarize = self._timed(kernel.summarize)
        summarize.kernel = timed
        try:
            yield
        finally:
            summarize.kernel = kernel


def _kernel_time(steps: int, *size: int) -> float:
    """Return the seconds of a step that the kernel takes."""
    clock = KernelTime()
    with clock.measure():
        _tracked(1, 1, steps, *size)
    return clock.seconds / steps


SMALL_MODELS = (
    (1.6, 4, 64, 2, 32), (1.3, 6, 128, 4, 64), (1.15, 6, 256, 4, 128), (1.15, 6, 384, 8, 128)
)  # fmt: skip


def small_models() -> list[Row]:
    """Measure models whose steps are short, where the cost per tensor shows."""
    rows = []
    for limit, *size in SMALL_MODELS:
        layers, width, batch, length = size
        steps = max(2, 1280 // width)
        a, b, note = _tracked(1, 7, steps, *size)
        kernel = _kernel_time(steps, *size)
        name = f"GPT of {layers} layers, {width} wide, {batch} x {length} tokens ÷ untracked"
        row = Row(name, limit, True, a, b, note=note)
        ours, base = (statistics.median(times) for times in (a, b))
        tensors = int(note.split()[0])
        beside = (ours - base - kernel) / tensors
        parts = f"{kernel / tensors * 1e6:.0f} µs kernel, {beside * 1e6:.0f} µs beside it"
        row.note += f"; per tensor {parts}"
        rows.append(row)
    return rows


def small_models_table(rows: list[Row]) -> list[str]:
    """Return the lines of a table of small models; none if they were not measured."""
    lines = []
    for row in rows:
        model, is_small, _ = row.name.partition(" tokens ÷ untracked")
        if is_small and model.startswith("GPT of"):
            low, high = row.spread
            cells = (
                model.removeprefix("GPT of ") + " tokens", row.note.partition(";")[0],
                f"{row.ratio:.2f}", f"{low:.2f}-{high:.2f}", f"{row.limit:g}",
                row.note.rpartition("; per tensor ")[2],
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    titles = "| GPT | untracked | tracked ÷ untracked | middle half | target | per tensor |"
    return [titles, "| --- " * 6 + "|", *lines] if lines else []


def tracking_memory() -> list[Row]:
    """Measure that memory does not grow with the number of steps."""
    import psutil
    import torch

    import tensortap as tap

    _no_server()
    folder = _folder()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    process = psutil.Process(os.getpid())
    held = {}
    try:
        tap.init(folder)
        with tap.track(model, optimizer=optimizer, alerts=True) as tracker:
            for step in range(1, 2001):
                loss = model(torch.randn(16, 32)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                tracker.step(loss=loss.item())
                if step in (200, 2000):
                    assert tap.flush(60)
                    held[step] = float(process.memory_info().rss)
        assert not tap.receipt().dropped
        tap.finish()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    note = f"{held[2000] / 1e6:.0f} MB after 2,000 steps"
    return [Row("memory after 2,000 tracked steps ÷ after 200", 1.1, True, [held[2000]],
                [held[200]], note=note)]  # fmt: skip


ROWS = (gpt, gpt_every_10, analyses, health_rules, small_models, tracking_memory)
