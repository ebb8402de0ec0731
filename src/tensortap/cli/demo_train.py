"""The training program of the demo: run by `tensortap demo`, in a process of its own."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import numpy as np

import tensortap as tap


def data() -> tuple[Any, Any]:
    """Two spirals, to be told apart."""
    random = np.random.default_rng(0)
    turn = np.linspace(0.2, 3 * np.pi, 256)
    arm = np.stack([turn * np.cos(turn), turn * np.sin(turn)], 1) / 8
    points = np.concatenate([arm, -arm]) + random.normal(0, 0.02, (512, 2))
    return points.astype(np.float32), np.repeat([0, 1], 256)


def train_torch(steps: int) -> None:
    """A small network in torch."""
    import torch

    torch.manual_seed(0)
    points, labels = (torch.from_numpy(part) for part in data())
    layers = torch.nn.Sequential(
        torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(),
        torch.nn.Linear(64, 2),
    )  # fmt: skip
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.01)
    for _ in range(steps):
        hidden = layers[:4](points)
        loss = torch.nn.functional.cross_entropy(layers[4](hidden), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tap.catch(loss, "loss", every=10)
        tap.catch(hidden, every=10)
        tap.catch(layers[0].weight, "layers.0.weight", every=10)
        tap.catch(layers[0].weight.grad, "layers.0.weight.grad", every=10)


def train_numpy(steps: int) -> None:
    """The same in NumPy, by hand, where torch is not installed."""
    random = np.random.default_rng(0)
    points, labels = data()
    first = random.normal(0, 0.7, (2, 64)).astype(np.float32)
    second = random.normal(0, 0.12, (64, 2)).astype(np.float32)
    moments = [np.zeros_like(first), np.zeros_like(second)]
    target = np.eye(2, dtype=np.float32)[labels]
    for _ in range(steps):
        hidden = np.tanh(points @ first)
        scores = hidden @ second
        scores -= scores.max(1, keepdims=True)
        share = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        loss = -np.log((share * target).sum(1)).mean()
        slope = (share - target) / len(points)
        gradients = [points.T @ ((slope @ second.T) * (1 - hidden**2)), hidden.T @ slope]
        for weight, moment, gradient in zip((first, second), moments, gradients, strict=True):
            moment *= 0.9
            moment += gradient
            weight -= 0.5 * moment
        tap.catch(loss, "loss", every=10)
        tap.catch(hidden, every=10)
        tap.catch(first, "layers.0.weight", every=10)
        tap.catch(gradients[0], "layers.0.weight.grad", every=10)


if __name__ == "__main__":
    train = train_torch if importlib.util.find_spec("torch") else train_numpy
    train(int(sys.argv[1]))
    tap.flush(5)
    print(tap.receipt())
