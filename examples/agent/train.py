"""A small training whose loss turns into NaN after some steps. `agent.py` finds out why.

python train.py runs eps    # the code of last week
python train.py runs        # the code of today
"""

from __future__ import annotations

import sys
from collections import OrderedDict

import torch

import tensortap as tap


class Standardize(torch.nn.Module):
    """Give every row mean 0 and deviation 1."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centered = x - x.mean(1, keepdim=True)
        return centered / (centered.square().mean(1, keepdim=True) + self.eps).sqrt()


def main(folder: str, eps: float) -> None:
    torch.manual_seed(0)
    layers = {
        "embed": torch.nn.Linear(16, 32, bias=False),  # a blank input becomes a row of zeros
        "standardize": Standardize(eps),
        "relu": torch.nn.ReLU(),
        "head": torch.nn.Linear(32, 4),
    }
    model = torch.nn.Sequential(OrderedDict(layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    with tap.track(model, optimizer, alerts=True, to=folder) as tracker:
        step = tap.blackbox(train_step, model, optimizer)
        for number in range(20):
            x, y = torch.randn(8, 16), torch.randint(4, (8,))
            if number == 12:
                x[3] = 0  # a blank image of the data set
            loss = step(x, y)
            tracker.step(loss=loss)


if __name__ == "__main__":
    main(sys.argv[1], 1e-6 if "eps" in sys.argv else 0.0)
