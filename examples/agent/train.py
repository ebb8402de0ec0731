"""A small training whose loss turns into NaN after some steps. `agent.py` finds out why.

python train.py runs eps    # the code of last week
python train.py runs        # the code of today
"""

from __future__ import annotations

import sys

import torch

import tensortap as tap


class Standardize(torch.nn.Module):
    """Give every row mean 0 and deviation 1."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centered = x - x.mean(1, keepdim=True)
        return centered / (centered.square().mean(1, keepdim=True).sqrt() + self.eps)


def main(folder: str, eps: float) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), Standardize(eps), torch.nn.ReLU(), torch.nn.Linear(32, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    with torch.no_grad():
        model[0].bias.zero_()
    model[0].bias.requires_grad_(False)  # a blank input leaves a row of zeros behind
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
