"""Rows on traced local variables."""

from __future__ import annotations

import statistics
import sys
import time

from bench.harness import Row
from bench.runs import _no_server

_ROUNDS = 15
_CALLS = 50  # calls per model and round


def _model():
    import torch
    import torch.nn.functional as F  # noqa: N812

    torch.set_num_threads(1)

    def helper(x, weight, bias=None, scale=None):
        rows, width = x.shape
        if weight.shape[0] != width:
            raise ValueError(f"{rows} rows of {width} do not fit {weight.shape}")
        if scale is None:
            scale = width**-0.5
        scaled = weight * scale
        y = x @ scaled
        if bias is not None:
            y = y + bias
        gate = F.softmax(y, -1)
        mixed = F.layer_norm(gate * y, (width,))
        return F.dropout(mixed, 0.1, training=False) + x

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(64, 64) / 8)

        def forward(self, x):
            for _ in range(50):
                x = helper(x, self.weight)
            logits = x.mean(-1)
            return logits.exp()

    return Model()


def _in_turns(batches, *calls) -> list[list[float]]:
    """Return the median per round of each model, alternating call by call.

    Noise lasts longer than one call, so it affects all models alike.
    """
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(_ROUNDS):
        times: list[list[float]] = [[] for _ in calls]
        for x in batches:  # a new one per call: unchanged values are not kept again
            for mine, call in zip(times, calls, strict=True):
                start = time.perf_counter()
                call(x)
                mine.append(time.perf_counter() - start)
        for results, mine in zip(found, times, strict=True):
            results.append(statistics.median(mine))
    return found


def _by_lines(model):
    """Trace in the usual way: look at the locals at every line."""
    kept = []

    def on_event(frame, event, arg):
        if event == "line" and frame.f_code.co_name == "forward":
            value = frame.f_locals.get("logits")
            if value is not None:
                kept.append(value.detach().clone())
        return on_event

    def call(x):
        sys.settrace(on_event)
        try:
            model(x)
        finally:
            sys.settrace(None)

    return call


def helpers() -> list[Row]:
    import torch

    import tensortap as tap

    _no_server()
    traced, plain, by_lines = _model(), _model(), _model()  # each with its own functions
    x = [torch.randn(32, 64) for _ in range(_CALLS)]
    with tap.trace(traced, ["forward.logits"]) as tracer:
        a, b, c = _in_turns(x, traced, plain, _by_lines(by_lines))
    assert len(tracer.results["forward.logits"].values) == _ROUNDS * _CALLS
    first = Row("forward with 50 helper calls, one local traced ÷ untraced", 1.05, True, a, b)
    first.note = f"a forward of {statistics.median(b) * 1e3:.2f} ms"
    least = 1e-6  # below that it is noise
    added = [max(one - two, least) for one, two in zip(a, b, strict=True)]
    naive = [one - two for one, two in zip(c, b, strict=True)]
    second = Row("time added by sys.settrace on every line ÷ by tap.trace", 10, False, naive, added)
    second.note = f"{statistics.median(added) * 1e6:.0f} µs per traced value"
    return [first, second]


def _layers():
    import torch

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(128, 128)

        def forward(self, x):
            y = self.linear(x)
            return x + y.relu()

    return torch.nn.Sequential(*[Layer() for _ in range(100)])


def one_of_200() -> list[Row]:
    import torch

    import tensortap as tap

    _no_server()
    torch.set_num_threads(1)
    traced, plain = _layers(), _layers()
    x = [torch.randn(64, 128) for _ in range(_CALLS)]
    with tap.trace(traced, ["57.forward.y"]) as tracer:
        a, b = _in_turns(x, traced, plain)
    assert len(tracer.results["57.forward.y"].values) == _ROUNDS * _CALLS
    return [Row("a model with 200 modules, one path ÷ untraced", 1.02, True, a, b)]


ROWS = [helpers, one_of_200]
