"""`tensortap demo`: a real training in one process, a live session in another, in a minute."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from tensortap.server.server import Server

STEPS = 200
_LIMIT = 60.0


def demo(
    steps: int = typer.Option(STEPS, min=1, max=5000, help="Training steps."),
) -> None:
    """Train a small network in one process and watch its tensors from this one."""
    from rich.console import Console

    from tensortap.console import answers, live, tables

    console = Console()
    with tempfile.TemporaryDirectory(prefix="tensortap-demo-") as folder:
        # a key of its own: a demo must not touch the user's
        os.environ.pop("TENSORTAP_KEY", None)
        os.environ["XDG_CONFIG_HOME"] = folder
        server = live.start("127.0.0.1", 0, "512MB")
        console.rule("a live session in this process, a training program in another")
        script = Path(__file__).with_name("demo_train.py")
        command = [sys.executable, str(script), str(steps)]
        env = dict(os.environ, TENSORTAP_SERVER=str(server.address))
        env.pop("TENSORTAP_DISABLE", None)
        trainer = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        try:
            _follow(console, server, trainer)
            output, _ = trainer.communicate(timeout=_LIMIT)
        finally:
            trainer.kill()
        if trainer.returncode:
            console.print(f"the training program failed with {trainer.returncode}", style="red")
            raise typer.Exit(1)
        console.rule("tap.summary(): what was caught")
        console.print(tables.summary(answers.overview(server)))
        _use(console, server)
        console.rule("tap.receipt(): what it cost the training program")
        console.print(output.strip(), highlight=False, soft_wrap=True)
        server.close()


def _follow(console: Console, server: Server, trainer: subprocess.Popen[str]) -> None:
    """Print the losses as they arrive."""
    from tensortap.console import verbs
    from tensortap.viz import text

    history = server.history
    end = time.monotonic() + _LIMIT
    seen = 0
    while time.monotonic() < end:
        losses = history.records("loss")
        for record in losses[seen:]:
            value = float(verbs.get(history, "loss", step=record.step))
            bar = "█" * int(min(value, 3.0) * 16)
            line = f"step {record.step:4d}  loss {text.number(value):>7}  {bar}"
            console.print(line, highlight=False)
        seen = len(losses)
        if trainer.poll() is not None:
            break
        history.wait(history.written + 1, 0.2)


def _use(console: Console, server: Server) -> None:
    """What one would type next."""
    from tensortap.console import verbs

    console.rule('tap.get("layers.0.weight"): in this process, as it was in the other')
    weight = verbs.get(server.history, "layers.0.weight")
    before = verbs.get(server.history, "layers.0.weight", -1)
    moved = float(abs(weight - before).max())
    kind = f"{type(weight).__module__}.{type(weight).__name__}"
    console.print(f"a {kind} of shape {list(weight.shape)}; since the first capture its")
    console.print(f"largest change is {moved:.4f}")
