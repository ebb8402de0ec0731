"""Rows on ways to compile a tracked GPT: what is seen, in how many graphs, and what it costs."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import tempfile
from typing import Any

from bench.harness import Row, time_of
from bench.runs import _no_server

WAYS = ("eager", "compile", "fullgraph", "regional")
PARALLEL = "compile, DDP of two processes"
SETTINGS = ("plain", "DDP", "FSDP2", "checkpoint", "autocast")


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to compile and to track a GPT, which has 5 modules and 10 in each layer."""

    way: str = "compile"  # or one of WAYS, or "in place"
    setting: str = "plain"  # or one of SETTINGS, or "selective", "eval"
    backend: str = "aot_eager"
    options: tuple[tuple[str, Any], ...] = ()  # of torch.compile
    begin: str = "compiled"  # tracking begins before "compiling", or when "called" once
    wrapper: bool = False  # track what torch.compile returned
    width: int = 256
    vocabulary: int = 1024
    layers: int = 2


def compiled_ways() -> list[Row]:
    """Measure ways to compile a small GPT, with ahead-of-time autograd: seen, graphs, costs."""
    _start()
    return [_row(way, setting) for way in WAYS for setting in SETTINGS]


def compiled_ddp() -> list[Row]:
    """Measure a compiled GPT under DDP in two processes; torch splits it unless it is tracked."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_train_in_parallel, (folder,), nprocs=2)
        base, observed, others = json.loads(pathlib.Path(folder, "times").read_text())
    note = f"step of {statistics.median(base) * 1e3:.0f} ms, two processes"
    return [
        Row(f"{PARALLEL}, observed: tracked ÷ untracked", 1.5, True, observed, base, note=note),
        Row(f"{PARALLEL}, not observed: tracked ÷ untracked", 1.2, True, others, base, note=note),
    ]


def _train_in_parallel(rank: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    import tensortap as tap
    from bench.gpt import GPT

    torch.set_num_threads(1)
    _no_server()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    models = [torch.nn.parallel.DistributedDataParallel(GPT(vocabulary=1024)) for _ in range(2)]
    case = Case(setting="DDP")
    with tap.track(models[1], every=2, kind=("activation", "gradient")) as tracker:
        alone, tracked = (torch.compile(model, backend="aot_eager") for model in models)
        with torch._dynamo.config.patch(optimize_ddp=True):  # as it is without tracking
            _step(alone, case, None)
        for _ in range(2):
            _step(tracked, case, tracker)
        steps = [lambda: _step(alone, case, None), *[lambda: _step(tracked, case, tracker)] * 2]
        turns = [[time_of(step) for step in steps] for _ in range(20)]
    if not rank:
        pathlib.Path(folder, "times").write_text(json.dumps(list(zip(*turns, strict=True))))
    dist.destroy_process_group()


def _start() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(2)
    _no_server()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _row(way: str, setting: str) -> Row:
    import torch

    name = f"{way}, {setting}: tracked ÷ untracked"
    case = Case(way, setting)
    try:
        base, alone, _ = run(case, False)
        ours, graphs, note = run(case, True)
    except torch._dynamo.exc.Unsupported:
        return Row(name, None, True, [float("nan")], [1.0], note="torch raises: its hooks break it")
    return Row(name, 1.5, True, ours, base, note=f"{note}, graphs {graphs} ({alone})")


# -- options -----------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"width": 32, "vocabulary": 64}
OPTIONS = {
    "tracked before torch.compile": Case(begin="compiling"),
    "tracked after the first call": Case(begin="called"),
    "torch.compile(model) tracked": Case(wrapper=True),
    "model.compile()": Case("in place"),
    "blocks": Case("regional"),
    "fullgraph=True": Case("fullgraph"),
    "dynamic=True": Case(options=(("dynamic", True),)),
    'mode="reduce-overhead"': Case("fullgraph", options=(("mode", "reduce-overhead"),)),
    'mode="max-autotune-no-cudagraphs"': Case(options=(("mode", "max-autotune-no-cudagraphs"),)),
    "DDP": Case(setting="DDP"),
    "FSDP2": Case(setting="FSDP2"),
    "FSDP2, blocks": Case("regional", "FSDP2"),
    "checkpoint": Case("fullgraph", "checkpoint"),
    "selective checkpoint": Case("fullgraph", "selective"),
    "autocast": Case("fullgraph", "autocast"),
    "eval": Case("fullgraph", "eval"),
}


def compiled_options() -> list[Row]:
    """Count the graphs of a tiny GPT, tracked and not, for the options of torch.compile."""
    _start()
    return [
        graphs_row(f"{name}, {backend}", dataclasses.replace(case, backend=backend, **SMALL))
        for backend in ("inductor", "aot_eager", "eager")
        for name, case in OPTIONS.items()
        if backend == "inductor" or "mode" not in dict(case.options)  # other backends have none
    ]


def graphs_row(name: str, case: Case) -> Row:
    """Return the row of a case: graphs tracked ÷ untracked, which fails if a module is not seen."""
    _, alone, _ = run(case, False, steps=2)
    _, graphs, note = run(case, True, steps=2)
    expected = f"{25 if case.setting == 'eval' else 50} of 50 seen, 0 unseen"
    ratio = float(graphs) if note == expected else float("inf")
    return Row(f"graphs, {name}: tracked ÷ untracked", 1.0, True, [ratio], [float(alone)],
               note=f"{note}, graphs {graphs} ({alone})")  # fmt: skip


# -- one case ----------------------------------------------------------------------------------


def run(case: Case, on: bool, steps: int = 9) -> tuple[list[float], int, str]:
    """Train for some steps; return their times but the first two, the graphs, and what is seen."""
    import torch
    from torch._dynamo.utils import counters

    import tensortap as tap

    torch._dynamo.reset()
    model = _model(case)
    options = {"kind": ("activation", "gradient"), "only_training": case.setting != "eval"}
    tracker = tap.track(model, **options)
    if on and case.begin == "compiling":
        tracker.__enter__()
    call = _compiled(case, model)
    if case.begin == "called":
        _step(call, case, None)
    if case.wrapper:
        tracker = tap.track(call, **options)
    if on and case.begin != "compiling":
        tracker.__enter__()
    elif case.begin == "called":
        torch._dynamo.reset()
    counters.clear()
    times = [time_of(lambda: _step(call, case, tracker if on else None)) for _ in range(steps)]
    seen = {(r.kind, r.name) for r in tracker.records if r.step == 1 and r.stats}
    modules = 5 + 10 * case.layers  # with a value and a gradient each
    note = f"{len(seen)} of {2 * modules} seen, {len(tracker.unseen)} unseen"
    if on:
        tracker.__exit__(None, None, None)
    return times[2:], counters["stats"]["unique_graphs"], note


def _model(case: Case) -> Any:
    import torch
    from torch.utils import checkpoint as checkpoints

    from bench.gpt import GPT

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        policies = checkpoints.CheckpointPolicy
        return policies.MUST_SAVE if saved else policies.PREFER_RECOMPUTE

    torch.manual_seed(0)
    model = GPT(layers=case.layers, width=case.width, vocabulary=case.vocabulary)
    options: dict[str, Any] = {"use_reentrant": False}
    if case.setting == "selective":
        options["context_fn"] = lambda: checkpoints.create_selective_checkpoint_contexts(policy)
    for block in model.blocks if case.setting in ("checkpoint", "selective") else ():
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoints.checkpoint(forward, x, **options)
    return model.train(case.setting != "eval")


def _compiled(case: Case, model: Any) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    options = {"fullgraph": case.way in ("fullgraph", "regional"), **dict(case.options)}
    if "mode" not in options:
        options["backend"] = case.backend
    parts = {"regional": model.blocks, "in place": [model]}.get(case.way, [])
    for part in parts:
        part.compile(**options)
    call = model
    if case.setting == "DDP":
        call = torch.nn.parallel.DistributedDataParallel(model)
    elif case.setting == "FSDP2":
        for module in (*model.blocks, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    return torch.compile(call, **options) if case.way in ("compile", "fullgraph") else call


def _step(call: Any, case: Case, tracker: Any) -> None:
    import torch

    tokens = torch.randint(case.vocabulary, (8, 128), generator=torch.Generator().manual_seed(0))
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=case.setting == "autocast"),
        torch.set_grad_enabled(case.setting != "eval"),
    ):
        loss = call(tokens).square().mean()
    if case.setting != "eval":
        loss.backward()
    if tracker is not None:
        tracker.step()


ROWS = (compiled_ways, compiled_ddp, compiled_options)
