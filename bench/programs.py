"""Rows on `tensortap run`: whole programs beside the plain ones, processor time and wall clock."""

from __future__ import annotations

import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

from bench.harness import Row, in_turns

FOLDER = pathlib.Path(__file__).parents[1] / "tests" / "health" / "collection" / "healthy"
PROGRAMS = (
    "tuned/k_fold_cross_validation", "tuned/dqn_with_target_network", "tuned/lora_with_peft",
    "tuned/small_diffusion", "tuned/trainer_gpt2", "held/accelerate_plain_loop",
    "held/compiled_mlp", "held/lightning_classifier_with_validation",
    "held/soft_actor_critic",
)  # fmt: skip
LONG = """
import torch
from torch import nn
torch.manual_seed(0)
widths = [512, 1024, 1024, 1024, 10]
layers = [layer for a, b in zip(widths, widths[1:]) for layer in (nn.Linear(a, b), nn.ReLU())]
model = nn.Sequential(*layers[:-1])
optimizer = torch.optim.AdamW(model.parameters())
for step in range(100):
    loss = nn.functional.cross_entropy(model(torch.randn(256, 512)), torch.randint(10, (256,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def run_programs() -> list[Row]:
    """Measure ten programs, from the start of Python to its end, with one thread."""
    with tempfile.TemporaryDirectory() as folder:
        long = pathlib.Path(folder, "long.py")
        long.write_text(LONG)
        paths = [*(FOLDER / f"{name}.py" for name in PROGRAMS), long]
        return [row for path in paths for row in _rows(path)]


def _rows(path: pathlib.Path) -> list[Row]:
    def times(*words: str) -> tuple[float, float]:
        used, began = _used(), time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                [sys.executable, *words, str(path)], cwd=folder, check=True,
                capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        return _used() - used, time.perf_counter() - began

    turns = in_turns(3, times, lambda: times("-m", "tensortap", "run"))
    (base, base_wall), (ours, ours_wall) = (zip(*each, strict=True) for each in turns)
    name = f"tensortap run {path.stem} ÷ the plain program"
    return [
        Row(name, None, True, list(ours), list(base), note="processor time"),
        Row(name, None, True, list(ours_wall), list(base_wall), note="wall clock"),
    ]


def _used() -> float:
    """Return the processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


ROWS = (run_programs,)
