"""Rows on tracking inside graphs of torch.compile: costs, what is seen, bits."""

from __future__ import annotations

import functools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.harness import Row
from bench.runs import _folder, _no_server

WAYS = ("eager", "compile", "fullgraph", "regional")
SETTINGS = ("plain", "DDP", "FSDP2", "checkpoint", "autocast")


def compiled() -> list[Row]:
    """Measure a step of a compiled GPT: observed, not observed, and its compilation."""
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
    note = f"step of {statistics.median(plain) * 1e3:.0f} ms"
    return [
        Row("compiled GPT, all tracked ÷ untracked", 1.25, True, observed, plain, note=note),
        Row("the same, steps not observed ÷ untracked", 1.01, True, others, plain),
        Row("compiling a tracked GPT ÷ untracked", 1.3, True, [compiling["ours"]],
            [compiling["base"]], note=f"{compiling['base']:.0f} s"),
    ]  # fmt: skip


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# -- what is seen ----------------------------------------------------------------------------


def compiled_ways() -> list[Row]:
    """Measure ways to compile a small GPT, with ahead-of-time autograd: seen, graphs, costs."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(2)
    _no_server()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return [row for way in WAYS for setting in SETTINGS for row in _way(way, setting)]


def _way(way: str, setting: str) -> Iterator[Row]:
    import torch
    from torch._dynamo.utils import counters

    import tensortap as tap

    found = []
    for on in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model, call = _model(way, setting)
        tracker = tap.track(model, weights=False, optimizer_state=False)
        if on:
            tracker.__enter__()
        try:
            step = functools.partial(_step, call, setting, tracker if on else None)
            times = [_seconds(step) for _ in range(9)][2:]
        except torch._dynamo.exc.Unsupported:
            return  # torch itself cannot: the hooks of FSDP break the graph
        modules = 25  # of two layers, and of what is around them
        seen = {(r.kind, r.name) for r in tracker.records if r.step == 1 and r.stats}
        note = f"{len(seen)} of {2 * modules} seen, {len(tracker.unseen)} unseen"
        found.append((times, counters["stats"]["unique_graphs"], note))
        if on:
            tracker.__exit__(None, None, None)
    (base, alone, _), (ours, graphs, note) = found
    name = f"{way}, {setting}: tracked ÷ untracked"
    yield Row(name, 1.5, True, ours, base, note=f"{note}, graphs {graphs} ({alone})")


def _model(way: str, setting: str) -> tuple[Any, Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import checkpoint

    from bench.gpt import GPT

    torch.manual_seed(0)
    model = GPT(layers=2, vocabulary=1024)
    if setting == "checkpoint":
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    options: dict[str, Any] = {
        "backend": "aot_eager",
        "fullgraph": way in ("fullgraph", "regional"),
    }
    if way == "regional":
        for block in model.blocks:
            block.compile(**options)
    call: Any = model
    if setting == "DDP":
        call = torch.nn.parallel.DistributedDataParallel(model)
    elif setting == "FSDP2":
        for module in (*model.blocks, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    return model, torch.compile(call, **options) if way in ("compile", "fullgraph") else call


def _step(call: Any, setting: str, tracker: Any) -> None:
    import torch

    tokens = torch.randint(1024, (8, 128), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16, enabled=setting == "autocast"):
        loss = call(tokens).square().mean()
    loss.backward()
    if tracker is not None:
        tracker.step()


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
    inputs = {
        "GPT": torch.randint(256, (4, 32)),
        "convolutions": torch.randn(8, 3, 16, 16),
        "perceptron": torch.randn(32, 64),
    }
    return [
        _bits(name, make, inputs[name], dtype)
        for name, make in models.items()
        for dtype in ("float32", "bfloat16", "autocast")
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
    most = max(differ, key=lambda key: differ[key])
    note = "bit-identical" if not differ[most] else f"{differ[most]:.1e} of the largest, in {most}"
    return Row(f"bits of a compiled {name}, {dtype}", 1.01, True, [1 + differ[most]], [1.0],
               note=note)  # fmt: skip


ROWS = (compiled, compiled_ways, compiled_bits)
