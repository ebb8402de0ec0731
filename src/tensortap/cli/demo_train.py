"""The training program of the demo, which `tensortap demo` runs in a process of its own.

``python demo_train.py steps runs bug``: the number of steps, the folder of runs, and the step from
which one layer computes in bfloat16, as if somebody had forgotten a cast (-1: never).
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import numpy as np

import tensortap as tap


def data() -> tuple[Any, Any]:
    """Return points on two spirals, and which spiral each point is on."""
    random = np.random.default_rng(0)
    turn = np.linspace(0.2, 3 * np.pi, 128)
    arm = np.stack([turn * np.cos(turn), turn * np.sin(turn)], 1) / 8
    points = np.concatenate([arm, -arm]) + random.normal(0, 0.02, (256, 2))
    return points.astype(np.float32), np.repeat([0, 1], 128)


def train_torch(steps: int, bug: int) -> None:
    """Train a small torch network, with everything tracked."""
    import torch

    class Spirals(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 64)
            self.middle = torch.nn.Linear(64, 64)
            self.outer = torch.nn.Linear(64, 2)

        def forward(self, points: Any) -> Any:
            hidden = torch.tanh(self.inner(points))
            return self.outer(torch.tanh(self.middle(hidden)))

    torch.manual_seed(0)
    points, labels = (torch.from_numpy(part) for part in data())
    model = Spirals()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    right = model.middle.forward
    # store the small tensors between the layers whole, not only their statistics
    whole = r"^(inner|middle|outer)$"
    with tap.track(model, optimizer, every=5, tensors=whole, alerts=True) as tracker:
        for step in range(steps):
            if step == bug:
                model.middle.forward = lambda hidden: right(hidden).bfloat16().float()
            loss = torch.nn.functional.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tap.catch(model.middle.weight, "caught", every=20)
            tracker.step(loss=loss)


def train_numpy(steps: int, bug: int) -> None:
    """Train the same network in NumPy, for environments without torch."""
    random = np.random.default_rng(0)
    points, labels = data()
    inner = random.normal(0, 0.7, (2, 64)).astype(np.float32)
    outer = random.normal(0, 0.12, (64, 2)).astype(np.float32)
    moments = [np.zeros_like(inner), np.zeros_like(outer)]
    target = np.eye(2, dtype=np.float32)[labels]
    for step in range(steps):
        hidden = np.tanh(points @ inner)
        if 0 <= bug <= step:
            hidden = (hidden.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        scores = hidden @ outer
        scores -= scores.max(1, keepdims=True)
        share = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        loss = -np.log((share * target).sum(1)).mean()
        slope = (share - target) / len(points)
        gradients = [points.T @ ((slope @ outer.T) * (1 - hidden**2)), hidden.T @ slope]
        for weight, moment, gradient in zip((inner, outer), moments, gradients, strict=True):
            moment *= 0.9
            moment += gradient
            weight -= 0.5 * moment
        tap.catch(float(loss), "loss")
        tap.catch(hidden, "hidden", every=5)
        tap.catch(inner, "caught", every=20)
        tap.catch(gradients[0], "inner.weight.grad", every=5)
        tap.step()


if __name__ == "__main__":
    print(tap.init(sys.argv[2]), flush=True)
    train = train_torch if importlib.util.find_spec("torch") else train_numpy
    train(int(sys.argv[1]), int(sys.argv[3]))
    print(tap.receipt())
    tap.finish()
