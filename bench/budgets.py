"""Rows on budgets: ten trainings, each in turns with an untracked twin, in processes of their own.

A twin is a process, or two for DDP. The parent lets one twin at a time make some steps. It takes
the processor time of all threads of the process, until its next turn, and the wall time. The cost
is what the tracked twin takes more, as a share of the untracked wall time: that is what a budget
promises. Each process computes on one core, so that no thread of torch spins while another works.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import re
import shutil
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.harness import Row
from bench.runs import _folder, _no_server

SHARES = {"1%": 1.015, "5%": 1.06}
_NOISE = "none"  # a second untracked twin, which shows the noise
_SECONDS = 16.0  # of measuring, per twin
_TURN = 0.15  # seconds of a turn, about
_WARM = 12  # steps before the first turn

Step = Callable[[Any], Any]
"""Makes one step, and tells a tracker (or None) about it."""


def _torch_step(model: Any, optimizer: Any, loss_of: Callable[[], Any]) -> tuple[Any, Any, Step]:
    def step(tracker: Any) -> None:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        value = loss.item()
        if tracker is not None:
            tracker.step(loss=value)

    return model, optimizer, step


def _classifier(model: Any, *shape: int, classes: int = 10) -> tuple[Any, Any, Step]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x, y = torch.randn(shape), torch.randint(classes, shape[:1])
    loss_of = lambda: torch.nn.functional.cross_entropy(model(x), y)  # noqa: E731
    return _torch_step(model, optimizer, loss_of)


def mlp() -> tuple[Any, Any, Step]:
    from torch import nn

    sizes = [256, 512, 512, 512, 512, 10]
    pairs = itertools.pairwise(sizes)
    layers = [layer for a, b in pairs for layer in (nn.Linear(a, b), nn.ReLU())]
    return _classifier(nn.Sequential(*layers[:-1]), 256, 256)


def cnn() -> tuple[Any, Any, Step]:
    from torch import nn

    layers: list[nn.Module] = []
    for a, b in itertools.pairwise([3, 32, 64, 64, 128]):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
    return _classifier(nn.Sequential(*layers), 32, 3, 32, 32)


def _gpt(*size: int) -> tuple[Any, Any, Step]:
    from bench.gpt import Training

    training = Training(*size)

    def step(tracker: Any) -> None:
        loss = training.step()
        if tracker is not None:
            tracker.step(loss=loss)

    return training.model, training.optimizer, step


def gpt_small() -> tuple[Any, Any, Step]:
    return _gpt(4, 64, 2, 32)


def gpt_larger() -> tuple[Any, Any, Step]:
    return _gpt(6, 256, 2, 128)


def lstm() -> tuple[Any, Any, Step]:
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(1000, 64)
            self.lstm = nn.LSTM(64, 128, num_layers=2, batch_first=True)
            self.head = nn.Linear(128, 1000)

        def forward(self, x: Any) -> Any:
            return self.head(self.lstm(self.tokens(x))[0][:, -1])

    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randint(1000, (16, 32)), torch.randint(1000, (16,))
    return _torch_step(model, optimizer, lambda: nn.functional.cross_entropy(model(x), y))


def tiny_modules() -> tuple[Any, Any, Step]:
    from torch import nn

    layers = [each for _ in range(200) for each in (nn.Linear(32, 32), nn.Tanh())]
    return _classifier(nn.Sequential(*layers, nn.Linear(32, 10)), 64, 32)


def ddp() -> tuple[Any, Any, Step]:
    from torch import nn

    model, _, _ = mlp()
    return _classifier(nn.parallel.DistributedDataParallel(model), 256, 256)


def compiled() -> tuple[Any, Any, Step]:
    import torch

    from bench.gpt import Training

    training = Training(4, 128, 4, 64)
    optimizer = torch.optim.AdamW(training.model.parameters(), lr=3e-4)
    model, data = torch.compile(training.model), training.data

    def loss_of() -> Any:
        logits = model(data[:, :-1]).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, data[:, 1:].flatten())

    return _torch_step(model, optimizer, loss_of)


def jax() -> tuple[Any, Any, Step]:
    import jax

    from bench.track_jax import _training

    update, params, state, tokens = _training(4, 64, 128, 2048, 3)
    states = [params, state]

    def step(tracker: Any) -> None:
        if tracker is None:
            states[0], states[1], _ = update(*states, tokens)
        else:
            states[0], states[1], grads = tracker.intercept(update, *states, tokens)
            tracker.step(states[0], states[1], grads)
        jax.block_until_ready(states[0])

    return params, state, step


def data_bound() -> tuple[Any, Any, Step]:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    model = nn.Sequential(nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    batches = itertools.chain.from_iterable(
        DataLoader(_Slow(), batch_size=16, num_workers=1) for _ in itertools.count()
    )

    def loss_of() -> Any:
        x, y = next(batches)
        return nn.functional.cross_entropy(model(x), y)

    return _torch_step(model, optimizer, loss_of)


class _Slow:
    """A data set whose examples take about a millisecond each."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        import torch

        x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(index))
        return torch.fft.fft(x).real.mean(0), index % 10


WORKLOADS = (
    mlp, cnn, gpt_small, gpt_larger, lstm, tiny_modules, ddp, compiled, jax, data_bound,
)  # fmt: skip


def train(
    pipe: Any, name: str, options: dict[str, Any] | None, folder: str, rank: int, port: int
) -> None:
    """Make as many steps as the parent says, and send what they took; at the end, the coverage."""
    import torch

    torch.set_num_threads(1)
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    if port:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port),
                       "MASTER_ADDR": "127.0.0.1"}  # fmt: skip
        torch.distributed.init_process_group("gloo")
    import tensortap as tap

    _no_server()
    torch.manual_seed(0)
    model, optimizer, step = globals()[name]()
    with contextlib.ExitStack() as stack:
        tracker = None
        if options is not None:
            path = tap.init(folder)
            tracker = stack.enter_context(tap.track(model, optimizer, **options))
        before = time.process_time()
        while steps := pipe.recv():
            start = time.perf_counter()
            for _ in range(steps):
                step(tracker)
            pipe.send((time.perf_counter() - start, steps))
            assert pipe.recv() == "cost"  # after what its threads still had to do
            now = time.process_time()
            pipe.send(now - before)
            before = now
        offered = 0 if tracker is None else len(set(tracker._names()))
    if tracker is not None:
        tap.finish()
        pipe.send((*_coverage(tap.open(path).stats()), offered))


def _coverage(frame: Any) -> tuple[int, int, float]:
    """Return how many tensors were seen, the step at which all had been, and the usual gap."""
    frame = frame[frame["count"] > 0] if "count" in frame else frame
    # the first steps look at everything, whatever it costs
    frame = frame[(frame["kind"] != "Metric") & (frame["step"] >= _WARM)]
    if not len(frame):
        return 0, 0, 0.0
    steps = frame.groupby(["kind", "name"])["step"].unique()
    first = [int(each.min()) for each in steps]
    gaps = [gap for each in steps for gap in _gaps(each)]
    return len(first), max(first) - _WARM + 1, statistics.median(gaps) if gaps else 0.0


def _gaps(steps: Any) -> list[int]:
    return [b - a for a, b in itertools.pairwise(sorted(steps.tolist()))]


def measured(name: str, options: dict[str, Any], seconds: float = _SECONDS) -> dict[str, Any]:
    """Return wall and processor time per step of each turn, by twin, and the coverage.

    `options` are those of `track` by twin, besides the untracked one; None is a second one.
    """
    with contextlib.ExitStack() as stack:
        twins: dict[str, list[Any]] = {}
        for twin, own in {"": None, **options}.items():
            port = _free_port() if name == "ddp" else 0
            folder = _folder()
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            twins[twin] = [
                stack.enter_context(_process(train, name, own, folder, rank, port))
                for rank in range(2 if port else 1)
            ]

        def turn(pipes: list[Any], steps: int) -> tuple[float, float]:
            for pipe in pipes:
                pipe.send(steps)
            walls = [pipe.recv()[0] for pipe in pipes]
            time.sleep(0.02)  # what threads do later is theirs, too
            for pipe in pipes:
                pipe.send("cost")
            return max(walls) / steps, sum(pipe.recv() for pipe in pipes) / steps / len(pipes)

        for pipes in twins.values():
            turn(pipes, _WARM)
        steps = max(1, round(_TURN / turn(twins[""], 5)[0]))
        found: dict[str, list[tuple[float, float]]] = {twin: [] for twin in twins}
        end = time.perf_counter() + seconds * len(twins)
        order = list(twins)
        while time.perf_counter() < end or len(found[""]) < 15:
            for twin in order:
                found[twin].append(turn(twins[twin], steps))
            order.reverse()  # none is always the first
        coverage = {}
        for twin, pipes in twins.items():
            for pipe in pipes:
                pipe.send(0)
            if options.get(twin) is not None:
                coverage[twin], *_ = [pipe.recv() for pipe in pipes]
        return {"turns": found, "coverage": coverage, "steps": steps}


@contextlib.contextmanager
def _process(target: Any, *args: Any) -> Iterator[Any]:
    """Run `target(pipe, *args)` in a process that may have children, as data loaders do."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    child = spawn.Process(target=target, args=(there, *args))
    child.start()
    there.close()
    try:
        yield here
        child.join(60)
    finally:
        child.kill()
        child.join()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def rows_of(name: str, found: dict[str, Any], limits: dict[str, Any]) -> list[Row]:
    """Return a row for each budget; its times are the processor time that a wall step stands for.

    The untracked step counts with its wall time; what the tracked twin takes more in the same round
    is added to it.
    """
    plain = found["turns"][""]
    rows = []
    for twin, limit in limits.items():
        ours = found["turns"][twin]
        wall = statistics.median(a[0] / b[0] for a, b in zip(ours, plain, strict=True))
        base = statistics.median(b[0] for b in plain)
        extra = [a[1] - b[1] for a, b in zip(ours, plain, strict=True)]
        note = f"wall {wall:.3f}, step {base * 1e3:.1f} ms"
        if twin in found["coverage"]:
            seen, steps, gap, offered = found["coverage"][twin]
            offered = max(seen, offered)  # JAX names outputs only when it has run
            note += f", {seen} of {offered} tensors within {steps} steps, then each {gap:.0f}"
        title = name.replace("_", " ")
        rows.append(
            Row(f"{title}, budget {twin} ÷ untracked", limit, True, [base + e for e in extra],
                [base] * len(extra), note=note, cold_row=True)
        )  # fmt: skip
    return rows


def budget(seconds: float = _SECONDS) -> list[Row]:
    options: dict[str, Any] = {share: {"budget": share} for share in SHARES} | {_NOISE: None}
    rows = []
    for workload in WORKLOADS:
        name = workload.__name__
        rows += rows_of(name, measured(name, options, seconds), {**SHARES, _NOISE: None})
    return rows


def rules() -> list[Row]:
    """Measure what `tensortap run` does by default: all rules within 5%, and what they add."""
    ours = {"alone": {"budget": "5%"}, "rules": {"budget": "5%", "alerts": True}}
    rows = []
    for name in ("cnn", "gpt_larger"):
        found = measured(name, ours, 40.0)
        beside = {"": found["turns"]["alone"], "rules": found["turns"]["rules"]}
        added = {"turns": beside, "coverage": {}}
        for twins, base, limit in (found, "untracked", SHARES["5%"]), (added, "budget 5%", 1.01):
            (row,) = rows_of(name, twins, {"rules": limit})
            title = name.replace("_", " ")
            row.name = f"{title}: budget 5% with all rules ÷ {base}"
            rows.append(row)
    return rows


def idle(seconds: float = 40.0) -> list[Row]:
    """Measure trackers that are ready and have nothing switched on."""
    rows = []
    for name in ("gpt_small", "compiled"):
        found = measured(name, {"idle": {"every": 0}}, seconds)
        limit = 1.005 if name != "compiled" else None
        (row,) = rows_of(name, found, {"idle": limit})
        row.name = row.name.replace("budget idle", "every=0")
        rows.append(row)
    return rows


def table(rows: list[Row]) -> list[str]:
    """Return the lines of the table of budgets; none if they were not measured."""
    found: dict[str, list[str]] = {}
    for row in rows:
        title, is_budget, _ = row.name.partition(", budget ")
        if is_budget:
            seen = re.search(r"(\d+) of \d+ tensors within \d+ steps, then each (\d+)", row.note)
            coverage = f" ({'/'.join(seen.groups())})" if seen else ""
            found.setdefault(title, []).append(f"{row.ratio - 1:+.1%}{coverage}")
    lines = ["| training | 1% | 5% | untracked |", "| --- | --- | --- | --- |"]
    lines += [f"| {' | '.join([title, *cells])} |" for title, cells in found.items()]
    return lines if found else []


ROWS = (budget, rules, idle)

if __name__ == "__main__":  # a quick look: everything within 12 minutes
    print("\n".join(table(budget(8.0))), flush=True)
    for each in idle(20.0):
        print(f"{each.name}: {each.ratio:.3f}")
