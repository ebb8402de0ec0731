"""Row on watched training, with steps short enough for all frames of rate 20."""

from __future__ import annotations

import shutil
import time

from bench.harness import Row, in_turns
from bench.runs import _folder, _no_server


def watched_step() -> list[Row]:
    import torch

    import tensortap as tap

    _no_server()
    folder = _folder()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1024),
        torch.nn.GELU(), torch.nn.Linear(1024, 256),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(256, 256)
    steps = 30

    def step() -> None:
        loss = (model(data) - data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    try:
        with tap.watch(None, tap.Recorder(folder), rate=20.0) as watcher:

            def base() -> float:
                start = time.perf_counter()
                for _ in range(steps):
                    step()
                return (time.perf_counter() - start) / steps

            def ours() -> float:
                watcher.attach({"layer": model[4]})
                took = base()
                watcher.detach("layer")
                assert watcher.flush(60)  # let the worker become idle before the other side runs
                return took

            a, b = in_turns(11, ours, base)
            receipt = watcher.receipt
        assert not receipt.reasons["error"], receipt
        assert receipt.processed > 3 * len(a), receipt
        note = f"{receipt.processed} frames, steps of {sorted(b)[len(b) // 2] * 1e3:.0f} ms"
        return [Row("step with one layer filmed at rate 20 ÷ without (1 torch thread)", 1.03, True,
                    a, b, note=note)]  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)


ROWS = (watched_step,)
