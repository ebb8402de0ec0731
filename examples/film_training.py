"""Film a small network while it learns a landscape.

    python examples/film_training.py [folder]

The network maps a place to the height of the land. The films show what it has learned so far, as
a surface, and one of its weight matrices, as an image.
"""

from __future__ import annotations

import math
import sys

import torch

import tensortap as tap
from tensortap.values.snapshot import borrow

SIDE, FRAMES = 64, 120


def landscape(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the height of the land: ripples around a point, a hill and a lake."""
    distance = torch.hypot(x - 0.25, y + 0.2)
    ripples = torch.cos(10 * distance) * torch.exp(-1.6 * distance)
    lake = torch.exp(-10 * ((x + 0.6) ** 2 + (y - 0.5) ** 2))
    return ripples - 0.8 * lake


def main(folder: str = "films") -> None:
    """Train, and film steps that get farther apart."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    line = torch.linspace(-1, 1, SIDE)
    y, x = torch.meshgrid(line, line, indexing="ij")
    wanted = landscape(x, y).reshape(-1, 1)
    waves = torch.stack([x, y], dim=-1).reshape(-1, 2) @ torch.randn(2, 32) * 3
    places = torch.cat([waves.sin(), waves.cos()], dim=1)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 48), torch.nn.GELU(), torch.nn.Linear(48, 48), torch.nn.GELU(),
        torch.nn.Linear(48, 1),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    look = {"size": (480, 360), "fps": 20, "format": "gif"}
    surface = tap.Recorder(folder, mode="surface", range=(-1, 1), **look)
    image = tap.Recorder(folder, mode="image", **look)
    filmed = {math.ceil(frame**1.25) for frame in range(FRAMES)}
    with surface, image:
        for step in range(max(filmed) + 1):
            output = model(places)
            loss = torch.nn.functional.mse_loss(output, wanted)
            if step in filmed:
                said = {"message": f"loss {loss.item():.4f}"}
                film(surface, "what the network knows", output.reshape(SIDE, SIDE), step, said)
                film(image, "model.0.weight", model[0].weight, step, said)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(*surface.films, *image.films, sep="\n")


def film(
    recorder: tap.Recorder, name: str, tensor: torch.Tensor, step: int, tags: dict[str, str]
) -> None:
    """Record one frame: a recorder needs nothing but a record."""
    value = borrow(tensor.detach())
    recorder(
        tap.core.record.Record(
            name, tap.core.record.Kind.VALUE, step, 0, step, 0, 1, 0, value=value, tags=tags
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
