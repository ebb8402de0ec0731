"""The rows of traced local variables."""

from __future__ import annotations

import sys
import time

from bench.harness import Row, in_turns
from bench.runs import _no_server

_CALLS = 50  # of the model, a measurement


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

    return Model(), [torch.randn(32, 64) for _ in range(_CALLS)]


def _time(model, batches) -> float:
    start = time.perf_counter()
    for x in batches:  # each another one: what has not changed is not kept again
        model(x)
    return (time.perf_counter() - start) / len(batches)


def _line(tracer):
    """How it is usually done: look at the locals at every line, keep what is wanted."""
    kept = []

    def on_event(frame, event, arg):
        if event == "line" and frame.f_code.co_name == "forward":
            value = frame.f_locals.get("logits")
            if value is not None:
                kept.append(value.detach().clone())
        return on_event

    sys.settrace(on_event)
    try:
        return tracer()
    finally:
        sys.settrace(None)


def helpers() -> list[Row]:
    import tensortap as tap

    _no_server()
    model, x = _model()

    def ours() -> float:
        with tap.trace(model, ["forward.logits"]) as tracer:
            took = _time(model, x)
        assert len(tracer.results["forward.logits"].values) == _CALLS
        return took

    def base() -> float:
        return _time(model, x)

    def lines() -> float:
        return _line(base)

    a, b, c = in_turns(15, ours, base, lines)
    note = f"a forward of {sorted(b)[len(b) // 2] * 1e3:.2f} ms"
    first = Row("forward with 50 helper calls, one local traced ÷ untraced", 1.05, True, a, b)
    first.note = note
    least = 1e-6  # less is not told from noise
    added = [max(one - two, least) for one, two in zip(a, b, strict=True)]
    naive = [one - two for one, two in zip(c, b, strict=True)]
    second = Row("sys.settrace on every line ÷ ours, of the time added", 10, False, naive, added)
    return [first, second]


def one_of_200() -> list[Row]:
    import torch

    import tensortap as tap

    _no_server()
    torch.set_num_threads(1)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(128, 128)

        def forward(self, x):
            y = self.linear(x)
            return x + y.relu()

    model = torch.nn.Sequential(*[Layer() for _ in range(100)])
    x = [torch.randn(64, 128) for _ in range(_CALLS)]

    def ours() -> float:
        with tap.trace(model, ["57.forward.y"]) as tracer:
            took = _time(model, x)
        assert len(tracer.results["57.forward.y"].values) == _CALLS
        return took

    a, b = in_turns(15, ours, lambda: _time(model, x))
    return [Row("a model with 200 modules, one path ÷ untraced", 1.02, True, a, b)]


ROWS = [helpers, one_of_200]
