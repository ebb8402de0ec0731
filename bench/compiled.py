"""Rows on tracking inside graphs of torch.compile: costs and bits."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

from bench.harness import Row
from bench.runs import _folder, _no_server

BITS = "bits of a compiled "
# by how much parameters may differ after four steps: float32 must be bit-identical
DTYPES = {"float32": 0.0, "bfloat16": 0.02, "autocast": 0.02}


def compiled() -> list[Row]:
    """Measure a step of a compiled GPT: observed, not observed, and its compilation."""
    plain, observed, others, compiling = _beside()
    note = f"step of {statistics.median(plain) * 1e3:.0f} ms"
    return [
        Row("compiled GPT, all tracked ÷ untracked", 1.25, True, observed, plain, note=note),
        Row("the same, steps not observed ÷ untracked", 1.01, True, others, plain),
        Row("compiling a tracked GPT ÷ untracked", 1.3, True, [compiling["ours"]],
            [compiling["base"]], note=f"{compiling['base']:.0f} s"),
    ]  # fmt: skip


def _beside() -> tuple[list[float], list[float], list[float], dict[str, float]]:
    """Return times of steps: untracked, observed and not observed; and of both compilations."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache = tempfile.mkdtemp()
    import torch

    import tensortap as tap
    from bench.gpt import Training

    torch.set_num_threads(2)
    _no_server()
    folder = _folder()
    torch.compile(lambda x: x + 1)(torch.ones(4))  # headers are compiled once per machine
    try:
        tap.init(folder)
        base, ours = Training(), Training()
        # both in one process: every second step of one of them is observed
        with tap.track(ours.model, optimizer=ours.optimizer, every=2) as tracker:
            steps = {"base": base.step, "ours": lambda: tracker.step(loss=ours.step())}
            for training in (base, ours):
                training.model = torch.compile(training.model, fullgraph=True)
            compiling = {name: _seconds(step) for name, step in steps.items()}
            steps["ours"]()
            turns = [(_seconds(steps["base"]), _seconds(steps["ours"]), _seconds(steps["ours"]))
                     for _ in range(15)]  # fmt: skip
        plain, observed, others = map(list, zip(*turns, strict=True))
        assert tap.flush(60)
        assert not tap.receipt().dropped
        tap.finish()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(cache, ignore_errors=True)
    return plain, observed, others, compiling


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# -- bits ------------------------------------------------------------------------------------


def compiled_bits() -> list[Row]:
    """Compare parameters after steps of tracked and untracked models that Inductor compiles."""
    import torch
    from torch import nn

    from bench.gpt import GPT

    _no_server()

    def vision() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Flatten(), nn.Linear(400, 10),
        )  # fmt: skip

    models: dict[str, Callable[[], nn.Module]] = {
        "GPT": lambda: GPT(layers=2, width=64, vocabulary=256, length=32),
        "convolutions": vision,
        "perceptron": lambda: nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)),
    }
    torch.manual_seed(0)
    inputs = {
        "GPT": torch.randint(256, (4, 32)),
        "convolutions": torch.randn(8, 3, 16, 16),
        "perceptron": torch.randn(32, 64),
    }
    return [
        _bits(name, make, inputs[name], dtype) for name, make in models.items() for dtype in DTYPES
    ]


def _bits(name: str, make: Callable[[], Any], x: Any, dtype: str) -> Row:
    import torch

    import tensortap as tap

    found = []
    for on in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = make()
        if dtype == "bfloat16":
            model, x = model.bfloat16(), x.bfloat16() if x.is_floating_point() else x
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tracker = tap.track(model)
        if on:
            tracker.__enter__()
        call = torch.compile(model, fullgraph=True)
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
                loss = call(x).float().square().mean()
            loss.backward()
            optimizer.step()
            if on:
                tracker.step()
        if on:
            tracker.__exit__(None, None, None)
        found.append({key: value.detach().double() for key, value in model.named_parameters()})
    differ = {
        key: (value - found[1][key]).abs().max().item() / max(value.abs().max().item(), 1e-30)
        for key, value in found[0].items()
    }
    most = sorted(differ, key=lambda key: -differ[key])[:3]
    largest = ", ".join(f"{differ[key]:.1e} ({key})" for key in most if differ[key])
    return Row(f"{BITS}{name}, {dtype}", 1 + DTYPES[dtype], True, [1 + differ[most[0]]], [1.0],
               note=largest or "bit-identical")  # fmt: skip


def bits_table(rows: Iterable[Row]) -> list[str]:
    """Return the lines of a table with the largest differences; none without the rows."""
    found = {
        row.name.removeprefix(BITS): row.note.partition(", ")[0]  # the largest of several
        for row in rows
        if row.name.startswith(BITS)
    }
    models = dict.fromkeys(name.partition(",")[0] for name in found)
    lines = [f"| model | {' | '.join(DTYPES)} |", "| --- " * (1 + len(DTYPES)) + "|"]
    lines += [
        f"| {model} | {' | '.join(found[f'{model}, {dtype}'] for dtype in DTYPES)} |"
        for model in models
    ]
    return lines if found else []


ROWS = (compiled, compiled_bits)
