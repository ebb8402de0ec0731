"""Rows on `tensortap run`: processor time of whole programs beside the plain ones."""

from __future__ import annotations

import os
import pathlib
import resource
import subprocess
import sys
import tempfile

from bench.harness import Row, in_turns

FOLDER = pathlib.Path(__file__).parents[1] / "tests" / "health" / "collection" / "healthy"
PROGRAMS = (
    "tuned/accumulation_with_division", "tuned/dqn_with_target_network", "tuned/lora_with_peft",
    "tuned/small_diffusion", "tuned/trainer_gpt2", "held/accelerate_plain_loop",
    "held/compiled_mlp", "held/gan_with_batchnorm", "held/lightning_classifier_with_validation",
    "held/tied_gpt_cosine_schedule",
)  # fmt: skip


def run_programs() -> list[Row]:
    """Measure ten programs, from the start of Python to its end, with one thread."""
    return [_row(name) for name in PROGRAMS]


def _row(name: str) -> Row:
    def seconds(*words: str) -> float:
        before = _used()
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                [sys.executable, *words, str(FOLDER / f"{name}.py")], cwd=folder, check=True,
                capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        return _used() - before

    seconds()  # bytecode is compiled
    base, ours = in_turns(3, seconds, lambda: seconds("-m", "tensortap", "run"))
    return Row(f"tensortap run {name} ÷ the plain program", None, True, ours, base)


def _used() -> float:
    """Return the processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


ROWS = (run_programs,)
