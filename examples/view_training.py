"""Train a small GPT, track all of it, and watch it in the browser.

    python examples/view_training.py            train and show the page
    python examples/view_training.py --no-view  only write the run

Halfway through, the learning rate is thirty times too high for a few steps. Find them.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from torch import nn
from torch.nn import functional

import tensortap as tap

TEXT = (
    "a tap draws from a running line without stopping the flow. what flows is seen, what is "
    "seen is kept, and what is kept can be compared. "
) * 40


class Block(nn.Module):
    """Attention and a perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).unbind(2)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(mask, -math.inf)
        tap.catch(weights, "attention.scores", every=40)
        y = (weights.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.proj(y)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A few blocks between an embedding and a head."""

    def __init__(self, letters: int, width: int = 64, depth: int = 4, length: int = 64) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(letters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        return self.head(self.norm(self.blocks(self.embed(x) + self.place(places))))


def train(steps: int, mistake: bool = True, pause: float = 0.0) -> None:
    """Train the model to memorize the text."""
    torch.manual_seed(0)
    letters = sorted(set(TEXT))
    data = torch.tensor([letters.index(letter) for letter in TEXT])
    model = GPT(len(letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with tap.track(
        model, optimizer=optimizer, tensors=r"^(head|blocks\.0\.qkv\.weight)", alerts=True
    ) as tracker:
        for step in range(steps):
            wrong = mistake and steps // 2 <= step < steps // 2 + 4
            rate = 3e-3 * min(1, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
            optimizer.param_groups[0]["lr"] = rate * (30 if wrong else 1)
            starts = torch.randint(len(data) - 65, (16,))
            batch = torch.stack([data[start : start + 65] for start in starts])
            scores = model(batch[:, :-1])
            loss = functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tracker.step(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
            time.sleep(pause)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--no-view", action="store_true")
    parser.add_argument("--right", action="store_true", help="without the mistake")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    given = parser.parse_args()
    run = tap.init(given.folder)
    if not given.no_view:
        tap.view(run)
    train(given.steps, mistake=not given.right, pause=given.pause)
    print(tap.receipt())
    tap.finish()
    if not given.no_view:
        input("Press Enter to end. ")


if __name__ == "__main__":
    main()
