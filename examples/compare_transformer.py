"""Find a bug in one layer of a transformer with `tap.compare`.

    python examples/compare_transformer.py              # all of them
    python examples/compare_transformer.py scale race   # some

Two processes train a small transformer, first correctly, then once with each bug. A run records
every output, gradient and weight. Comparing a run with the correct one names the layer, the step
and the rank where the bug first shows.

Needs torch. Leaves its runs in the folder `compare_transformer`.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import tensortap as tap

BUGS = {
    "scale": "from step 2, block 1 divides its scores by the root of the wrong width",
    "heads": "from step 3, block 2 joins two of its heads in the wrong order",
    "rounding": "from step 1, block 0 rounds its hidden layer to bfloat16",
    "race": "in step 4, rank 1 does not wait for the sum of a gradient of block 2",
}
STEPS, LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 6, 3, 32, 4, 12, 50


class Now:
    """The active bug and the current step."""

    bug = ""
    step = 0

    @classmethod
    def strikes(cls, bug: str, since: int) -> bool:
        return cls.bug == bug and cls.step >= since


class Scores(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        wrong = self.layer == 1 and Now.strikes("scale", since=2)
        width = WIDTH if wrong else q.shape[-1]
        return q @ k.transpose(-2, -1) / width**0.5


class Merge(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        if self.layer == 2 and Now.strikes("heads", since=3):
            heads = heads[:, [1, 0, 2, 3]]
        return heads.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.scores = Scores(layer)
        self.merge = Merge(layer)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        weights = self.scores(q, k).masked_fill(later, -torch.inf).softmax(-1)
        return self.out(self.merge(weights @ v))


class Hidden(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.gelu(x)
        if self.layer == 0 and Now.strikes("rounding", since=1):
            x = x.bfloat16().float()
        return x


class Block(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(layer)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), Hidden(layer), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(layer) for layer in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def average_gradients(model: nn.Module) -> None:
    """Average the gradients over all ranks, as data-parallel training does."""
    for name, parameter in model.named_parameters():
        total = parameter.grad.clone()
        dist.all_reduce(total)
        early = Now.bug == "race" and Now.step == 4 and dist.get_rank() == 1
        if early and name == "blocks.2.mlp.0.weight":
            continue  # continues with the gradient it computed itself
        parameter.grad.copy_(total / dist.get_world_size())


def train(bug: str, folder: Path) -> None:
    """Train a few steps into a run, with or without a bug."""
    Now.bug = bug
    tap.init(folder / (bug or "right"))
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    with tap.track(model, optimizer=optimizer, tensors=True) as tracker:
        for Now.step in range(STEPS):
            text = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=data)
            logits = model(text[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model)
            optimizer.step()
            tracker.step(loss=loss.item())
    tap.finish()


def train_all(bugs: list[str], folder: Path) -> dict[str, Path]:
    """Train in two processes, without a bug and with each; return run folders by name."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    source = Path(tap.__file__).parents[1]  # for a checkout that is not installed
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank), "--folder", str(folder), *bugs],
            env=dict(
                os.environ, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port), OMP_NUM_THREADS="1", PYTHONPATH=str(source),
            ),
        )
        for rank in range(2)
    ]  # fmt: skip
    ended = [process.wait() for process in ranks]
    if any(ended):
        raise SystemExit("training failed")
    names = ["right", *bugs]
    return {name: max(path for path in (folder / name).iterdir()) for name in names}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("bugs", nargs="*", metavar="BUG", help=f"of {', '.join(BUGS)}; else all")
    arguments.add_argument("--folder", type=Path, default=Path("compare_transformer"))
    arguments.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    said = arguments.parse_args()
    if unknown := set(said.bugs) - set(BUGS):
        arguments.error(f"unknown bug {min(unknown)}")
    bugs = said.bugs or list(BUGS)
    if said.rank is not None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        for bug in ["", *bugs]:
            train(bug, said.folder)
        dist.destroy_process_group()
        return
    runs = train_all(bugs, said.folder)
    for bug in bugs:
        print(f"\n== {bug}: {BUGS[bug]}")
        print(tap.compare(runs[bug], runs["right"]))


if __name__ == "__main__":
    main()
