"""The training program of the demo, which `tensortap demo` runs in a process of its own.

``python demo_train.py steps runs bug``: the number of steps, the folder of runs, and the step from
which one layer computes in bfloat16, as if somebody had forgotten a cast (-1: never). With a bug,
the last batch also has an empty sequence, which gives NaN.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

import tensortap as tap

_EVERY = 5  # steps between two that are tracked
_WORDS, _HALF = 16, 10  # different tokens; a sequence is a random half, and the same again


def train(steps: int, bug: int) -> None:
    """Train a small transformer to repeat a sequence, with everything tracked."""

    class Attention(nn.Module):  # type: ignore[misc]
        def __init__(self, width: int, title: str) -> None:
            super().__init__()
            self.title = title
            self.qkv = nn.Linear(width, 3 * width)
            self.softmax = nn.Softmax(-1)
            self.out = nn.Linear(width, width)

        def forward(self, x: Any, hidden: Any) -> Any:
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
            weights = self.softmax(scores)
            tap.catch(weights[0], self.title, every=4)
            return self.out(weights @ v)

    class TransformerBlock(nn.Module):  # type: ignore[misc]
        def __init__(self, width: int, number: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.attn = Attention(width, f"attention{number}")
            self.mlp = nn.Sequential(
                nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
            )

        def forward(self, x: Any, hidden: Any) -> Any:
            x = x + self.attn(self.norm(x), hidden)
            return x + self.mlp(x)

    class Transformer(nn.Module):  # type: ignore[misc]
        def __init__(self, width: int = 32) -> None:
            super().__init__()
            self.token = nn.Embedding(_WORDS, width)
            self.place = nn.Embedding(2 * _HALF, width)
            self.blocks = nn.ModuleList([TransformerBlock(width, 0), TransformerBlock(width, 1)])
            self.head = nn.Linear(width, _WORDS)

        def forward(self, tokens: Any, lengths: Any) -> Any:
            at = torch.arange(tokens.shape[1])
            hidden = (at > at[:, None]) | (at >= lengths[:, None, None])
            x = self.token(tokens) + self.place(at)
            for block in self.blocks:
                x = block(x, hidden)
            return self.head(x)

    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    right = model.blocks[1].mlp[0].forward
    last = (steps - 1) // _EVERY * _EVERY
    # store these whole, not only their statistics
    whole = r"^(blocks\.1\.(norm|attn|mlp\.0)|head)$"
    with tap.track(model, optimizer, every=_EVERY, tensors=whole, alerts=True) as tracker:
        for step in range(steps):
            half = torch.randint(_WORDS, (16, _HALF))
            tokens, lengths = torch.cat([half, half], 1), torch.full((16,), 2 * _HALF)
            if step == bug:
                model.blocks[1].mlp[0].forward = lambda x: right(x).bfloat16().float()
            if bug >= 0 and step == last:
                lengths[3] = 0
            scores = model(tokens[:, :-1], lengths)[:, _HALF - 1 :]
            loss = nn.functional.cross_entropy(scores.mT, tokens[:, _HALF:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tap.catch(model.head.weight, "caught", every=20)
            tracker.step(loss=loss)


if __name__ == "__main__":
    print(tap.init(sys.argv[2]), flush=True)
    train(int(sys.argv[1]), int(sys.argv[3]))
    print(tap.receipt())
    tap.finish()
